"""`fedexp report`: run folders as one HTML page, and as figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable
from fedexp.analysis.report.charts import check_metrics
from fedexp.analysis.report.figures import write_figures
from fedexp.analysis.report.page import count, render, write_page
from fedexp.analysis.report.sections import Targets, load_all, sections
from fedexp.errors import require


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="show runs as one HTML page that works offline")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="PATH",
        help="the page (report.html)",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="also draw PNG, SVG and PDF into this folder"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="M",
        help="draw this, e.g. test_accuracy or eps_share, instead of the defaults; may be repeated",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="[TASK=]X",
        help="accuracy (or loss) to reach; may be repeated",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for path in args.runs:
        require(path.is_dir(), f"{path}: no such folder; name a run folder, or a folder of runs")
    targets = Targets.parse(args.target)
    runs, problems = load_all(args.runs)
    for line in problems:
        print(f"fedexp: warning: {line}", file=sys.stderr)
    found = sections(runs)
    check_metrics(found, args.metric)
    targets.check(found)
    if args.figures:
        check_writable(args.figures / "curves.png", "--figures")
    write_page(args.out, render(found, args.metric, targets))
    size = f"{count(len(runs), 'run')}, {count(len(found), 'task')}"
    print(f"wrote {args.out} ({size})", file=sys.stderr)
    if args.figures:
        for path in write_figures(found, args.metric, args.figures):
            print(f"wrote {path}", file=sys.stderr)
    return 0
