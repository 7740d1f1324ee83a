"""Regenerate results/*/ and the blocks of the documents from the runs in results/runs.

With `--check` nothing is written, and the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedexp.errors import UsageError
from tools.results.documents import generate, stale, write


def main() -> int:
    root = Path(__file__).parents[2]
    try:
        made = generate(root)
    except UsageError as error:
        print(error)
        return 1
    if "--check" not in sys.argv[1:]:
        write(root, made)
    problems = stale(root, made)
    print(*problems or [f"{len(made)} files agree with results/runs"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
