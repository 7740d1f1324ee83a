"""Run a row of the leaderboard (docs/leaderboard.md); `make results` writes the page.

    python -m tools.leaderboard --algorithm fedexp --task digits
    python -m tools.leaderboard --algorithm all --task emnist --device cuda --precision bf16

A row is tuned on its grid, then its best point is run with three seeds. Stored trials and runs are
not run again: an interrupted command continues where it stopped. One process at a time may write to
the files of a task.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection
from pathlib import Path

from fedexp.errors import UsageError, unknown_name
from tools.leaderboard.protocol import ENTRIES, SMALL, TASKS, tasks_of
from tools.leaderboard.runs import Runner

FOLDER = Path(__file__).parents[2] / "results" / "leaderboard"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.leaderboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--algorithm", required=True, help=f"all, or of {', '.join(ENTRIES)}")
    parser.add_argument("--task", default=",".join(SMALL), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--device", help="e.g. cuda")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--restart", action="store_true", help="discard the stored row first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the CSV files")
    given = parser.parse_args(argv)
    deadline = time.monotonic() + given.seconds
    try:
        rows = list(ENTRIES) if given.algorithm == "all" else given.algorithm.split(",")
        names = given.task.split(",")
        _check("row", rows, ENTRIES)
        _check("task", names, TASKS)
        for name in names:
            runner = Runner(
                name,
                given.out,
                given.device,
                given.precision,
                deadline,
                log=lambda line: print(line, flush=True),
            )
            for row in rows:
                if name not in tasks_of(ENTRIES[row], names):
                    continue
                if given.restart:
                    runner.store.discard(row)
                if not runner.execute(ENTRIES[row]):
                    return 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _check(kind: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


if __name__ == "__main__":
    sys.exit(main())
