"""`fedexp report`: stored runs as one HTML page and as figures. `fedexp archive`: as small files.

An archive holds a CSV and a TOML file for each finished run, without states and models, so that it
fits into a repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable
from fedexp.analysis.report.charts import check_metrics, write_figures
from fedexp.analysis.report.page import count, render, write_page
from fedexp.analysis.report.sections import Targets, load_all, sections
from fedexp.errors import UsageError, require
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.files import disk_errors, write_bytes
from fedexp.runs.read import Parts, texts

FOLDER = "runs"  # in the archive


def add_parser(subparsers: Any) -> None:
    """Add both commands to the sub-parsers of the command line."""
    parser = subparsers.add_parser("report", help="show runs as one HTML page that works offline")
    _add_runs(parser)
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
    parser.set_defaults(run=report)

    parser = subparsers.add_parser(
        "archive", help="store finished runs for good: a small CSV and TOML each"
    )
    _add_runs(parser)
    parser.add_argument(
        "--to", type=Path, default=Path("results"), metavar="DIR", help="the archive (results)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="overwrite runs that are archived with other rounds"
    )
    parser.add_argument(
        "--note", metavar="TEXT", help="remark on how they were run, e.g. on a shared GPU"
    )
    parser.set_defaults(run=archive)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them"
    )


def _check_runs(args: argparse.Namespace) -> None:
    for path in args.runs:
        require(path.is_dir(), f"{path}: no such folder; name a run folder, or a folder of runs")


def report(args: argparse.Namespace) -> int:
    """Write the page, and the figures if they are wanted."""
    _check_runs(args)
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


def archive(args: argparse.Namespace) -> int:
    """Archive the finished runs among the given folders."""
    _check_runs(args)
    runs = _finished([load_run(folder) for folder in find_runs(args.runs)])
    folder = args.to / FOLDER
    new = runs if args.replace else [each for each in runs if _is_new(each, folder)]
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for each in new:
            for name, text in _files(each, args.note).items():
                write_bytes(folder / name, text.encode())
    print(
        f"fedexp: archived in {folder}: {len(new)} (there already: {len(runs) - len(new)})",
        file=sys.stderr,
    )
    return 0


def _finished(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs that are over; print a line for every other one."""
    for each in runs:
        if each.result is None:
            rounds = f"{len(each.rows)} of {each.spec['rounds']} rounds"
            print(f"fedexp: left out: {each.folder} is not over ({rounds})", file=sys.stderr)
    return [each for each in runs if each.result is not None]


def _files(run: StoredRun, note: str | None = None) -> dict[str, str]:
    """Return the texts of a run by file name; the CSV first: a TOML without it is no run."""
    assert run.result is not None
    about = {**run.environment, **({"note": note} if note else {})}
    described, rounds = texts(Parts(run.spec, about, run.rows, run.result))
    return {f"{run.spec['id']}.csv": rounds, f"{run.spec['id']}.toml": described}


def _is_new(run: StoredRun, folder: Path) -> bool:
    """Return whether a run is not archived yet; refuse one that is, with another result."""
    path = folder / f"{run.spec['id']}.toml"
    if not path.exists():
        return True
    if _computed(load_run(path)) != _computed(run):
        raise UsageError(
            f"{path} holds the same run with other results; nothing was written; leave the new one "
            "out, or take it with --replace"
        )
    return False


def _computed(run: StoredRun) -> tuple[str, str]:
    """Return the results of a run as the archive writes them, without the environment."""
    assert run.result is not None
    return texts(Parts(run.spec, {}, run.rows, run.result))
