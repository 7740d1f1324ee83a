"""`fedexp toy`: the paper's Figure 2, FedAvg and FedExP in two dimensions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable, save
from fedexp.analysis.tables import text_table
from fedexp.cli.options import add_out, positive
from fedexp.options import convert
from fedexp.reproduce.toy import toy_figure, toy_paths


def add_parser(subparsers: Any) -> None:
    """Add the command to the sub-parsers of the command line."""
    parser = subparsers.add_parser("toy", help="draw why extrapolation helps, in two dimensions")
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="default: 30")
    parser.add_argument(
        "--start", default="0,0", metavar="W1,W2", help="first model, e.g. --start=-1,2 (0,0)"
    )
    add_out(parser, "the figure (toy.png)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the iterates of the toy problem; print their distance to the optimum."""
    figure = args.out or Path("toy.png")
    check_writable(figure)
    start = convert(args.start, tuple[float, float], "--start")
    paths = toy_paths(start, args.rounds)
    save(toy_figure(paths), figure)
    shown = sorted({0, *(args.rounds * k // 3 for k in (1, 2, 3))})
    cells = [
        [name, *(f"{path.sq_distance[at]:.2g}" for at in shown), f"{path.loss[-1]:.2g}"]
        for name, path in paths.items()
    ]
    print("squared distance to the optimum, by round")
    print(text_table(["", *(f"{at}" for at in shown), "loss at the end"], cells))
    print(f"wrote {figure}", file=sys.stderr)
    return 0
