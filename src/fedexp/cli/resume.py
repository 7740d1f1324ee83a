"""`fedexp resume`: go on with a run, from its folder alone."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.cli.run import add_training_options, train
from fedexp.distributed import current
from fedexp.errors import require
from fedexp.runs import read_spec, spec_from
from fedexp.runs.folder import RunFolder


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("resume", help="go on with a run that was interrupted")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    add_training_options(parser)
    parser.add_argument(
        "--reopen",
        action="store_true",
        help="continue a run that diverged from its last checkpoint (a run on Flower does so "
        "without it, when its app starts again)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run, many=True)


def run(args: argparse.Namespace) -> int:
    among = current()
    read = partial(read_spec, args.folder)
    spec = read() if among is None else among.compute_on_first(read)
    require(not (args.reopen and args.restart), "--reopen and --restart exclude each other")
    if spec["engine"] == "flower" and args.reopen:
        return _reopen(args.folder, spec)
    require(
        spec["engine"] != "flower",
        f"{args.folder} is a run on Flower; start its app again, with the same checkpoint",
    )
    return train(spec_from(spec).prepare(), args.folder, args)


def _reopen(folder: Path, spec: dict[str, Any]) -> int:
    """Only the app of a run on Flower can train it; here it is made ready for that."""
    own = {name: value for name, value in spec.items() if name not in ("format", "id")}
    with RunFolder(folder, own, {}) as held:
        round = held.reopen()
    require(round is not None, f"{folder} has not diverged; start its app again to continue it")
    print(
        f"fedexp: {folder} continues after round {round}: start its app again, with the same "
        "checkpoint",
        file=sys.stderr,
    )
    return 0
