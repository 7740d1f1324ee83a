"""Run the study of outer optimisers; `make results` writes its tables.

    FEDEXP_DATA=... python -m tools.outer_study --jobs 2 --seconds 3600

Stored runs are not run again: the same command continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from fedexp.errors import UsageError
from tools.grid import execute, machine_of, parser_of
from tools.outer_study.measures import Curves, best_local_lr, best_rules, load, store
from tools.outer_study.protocol import Key, judged, tuning


def complete(keys: Iterable[Key], args: argparse.Namespace) -> dict[Key, Curves]:
    """Execute the runs that are not stored, and store them, some at a time; return all."""
    known = load(args.out)
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    while missing:
        some, missing = missing[: args.jobs], missing[args.jobs :]
        outcomes = execute([key.experiment() for key in some], args)
        for key, outcome in zip(some, outcomes, strict=True):
            known[key] = Curves.of(outcome.rows, machine_of(outcome))
        store(args.out, known)
    return known


def main(argv: list[str] | None = None) -> int:
    args = parser_of("tools.outer_study", __doc__).parse_args(argv)
    try:
        runs = complete(tuning(), args)
        complete(judged(best_rules(runs), best_local_lr(runs)), args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
