"""Run a row of the leaderboard (docs/leaderboard.md); `make results` writes the page.

    python -m tools.leaderboard --algorithm fedexp --task digits
    python -m tools.leaderboard --algorithm all --task emnist --device cuda --precision bf16

A row is tuned on its grid, then its best point is run with three seeds. Stored trials and runs are
not run again: an interrupted command continues where it stopped. One process at a time may write to
the files of a task.
"""

from __future__ import annotations

import sys

from fedexp.errors import UsageError
from tools.grid import named, parser_of
from tools.leaderboard.protocol import ENTRIES, SMALL, TASKS
from tools.leaderboard.runs import Store


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("tools.leaderboard", __doc__)
    parser.add_argument("--algorithm", required=True, help=f"all, or of {', '.join(ENTRIES)}")
    parser.add_argument("--task", default=",".join(SMALL), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--restart", action="store_true", help="discard the stored row first")
    args = parser.parse_args(argv)
    try:
        rows = ",".join(ENTRIES) if args.algorithm == "all" else args.algorithm
        entries = [ENTRIES[row] for row in named("row", rows, ENTRIES)]
        for task in named("task", args.task, TASKS):
            of_task = [entry for entry in entries if task in entry.centres]
            Store.load(task, args.out).complete(of_task, args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
