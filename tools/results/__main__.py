"""Write tables, figures, docs/reproduction.md and README's block anew from results/ alone.

`--check` writes nothing and fails where one of them is not what the archive says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedexp.errors import UsageError
from tools.results.build import generate, stale, write


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
    print(*problems or [f"{len(made)} files are what results/runs says"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
