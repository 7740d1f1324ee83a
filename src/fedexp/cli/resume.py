"""`fedexp resume`: continue a run, from its folder alone."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.cli.run import add_training_options, train
from fedexp.errors import require
from fedexp.runs import read_spec, spec_from
from fedexp.runs.folder import RunFolder
from fedexp.runs.spec import Run


def add_parser(subparsers: Any) -> None:
    """Add the command to the sub-parsers of the command line."""
    parser = subparsers.add_parser("resume", help="continue a run that was interrupted")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    add_training_options(parser)
    parser.add_argument(
        "--reopen",
        action="store_true",
        help="continue a run that diverged from its last checkpoint (a run on Flower does so "
        "without it, when its app starts again)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run, prepare=_prepare, many=True)


def run(args: argparse.Namespace) -> int:
    """Continue a run; one on Flower is reopened here, and trained by its app."""
    read = partial(read_spec, args.folder)
    args.spec = read() if args.ranks is None else args.ranks.compute_on_first(read)
    require(not (args.reopen and args.restart), "--reopen and --restart exclude each other")
    if args.spec["engine"] != "flower":
        return train(args)
    require(
        args.reopen,
        f"{args.folder} is a run on Flower; start its app again, with the same checkpoint",
    )
    own = {name: value for name, value in args.spec.items() if name not in ("format", "id")}
    with RunFolder(args.folder, own, {}) as held:
        round = held.reopen()
    require(
        round is not None, f"{args.folder} has not diverged; start its app again to continue it"
    )
    print(
        f"fedexp: {args.folder} continues after round {round}: start its app again, with the same "
        "checkpoint",
        file=sys.stderr,
    )
    return 0


def _prepare(args: argparse.Namespace) -> tuple[Run, Path]:
    """Return the run whose spec is stored in the folder."""
    return spec_from(args.spec).prepare(), args.folder
