"""`fedexp resume`: go on with a run, from its folder alone."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.cli.run import add_training_options, train
from fedexp.distributed import current
from fedexp.errors import require
from fedexp.runs import read_spec, spec_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("resume", help="go on with a run that was interrupted")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    add_training_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run, many=True)


def run(args: argparse.Namespace) -> int:
    among = current()
    read = partial(read_spec, args.folder)
    spec = read() if among is None else among.first(read)
    require(
        spec["engine"] != "flower",
        f"{args.folder} is a run on Flower; start its app again, with the same checkpoint",
    )
    return train(spec_from(spec).prepare(), args.folder, args)
