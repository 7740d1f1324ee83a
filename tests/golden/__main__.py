"""Store the results of this version: `python -m tests.golden`.

With beginnings of names, e.g. `python -m tests.golden 'run digits' flower`, nothing is stored: what
differs from the stored results is printed.
"""

from __future__ import annotations

import sys

from tests.golden.cases import CASES, compute
from tests.golden.essence import FILE, arithmetic, differences, store, stored


def main(beginnings: list[str]) -> int:
    """Store all cases, or compare some; return the exit status."""
    chosen = [name for name in CASES if name.startswith(tuple(beginnings) or "")]
    if not beginnings:
        store({name: compute(name) for name in chosen})
        print(f"{len(chosen)} cases in {FILE} ({FILE.stat().st_size:,} bytes)")
        return 0
    goldens, status = stored(), 0
    for name in chosen:
        exact = goldens["arithmetic"] == arithmetic()
        for line in differences(goldens[name], compute(name), exact):
            print(f"{name}{line}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
