"""`fedexp report`: stored runs as one HTML page and as figures. `fedexp archive`: as small files.

An archive holds a CSV and a TOML file for each finished run, without states and models, so that it
fits into a repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedexp.analysis.report.filters import Filters
from fedexp.analysis.report.page import write_report
from fedexp.analysis.report.sections import Targets
from fedexp.analysis.tables import count
from fedexp.cli.options import listed, note
from fedexp.errors import UsageError, require
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.read import texts
from fedexp.storage import disk_errors, write_bytes

FOLDER = "runs"  # in the archive


def _check_runs(args: argparse.Namespace) -> None:
    for path in args.runs:
        require(path.is_dir(), f"{path}: no such folder; name a run folder, or a folder of runs")


def report(args: argparse.Namespace) -> int:
    """Write the page, and the figures if they are wanted."""
    _check_runs(args)
    written = write_report(
        args.runs,
        args.out,
        metrics=args.metric,
        targets=Targets.parse(args.target),
        filters=Filters(
            tuple(listed(args.algorithm)),
            tuple(listed(args.task)),
            tuple(listed(args.rounds)),
            args.since,
            tuple(args.exclude),
        ),
        figures=args.figures,
        on_problem=lambda line: note(f"warning: {line}"),
    )
    size = f"{count(written.runs, 'run')}, {count(written.tasks, 'task')}"
    left_out = f"; {written.left_out}" if written.left_out else ""
    print(f"wrote {args.out} ({size}{left_out})", file=sys.stderr)
    for path in written.figures:
        print(f"wrote {path}", file=sys.stderr)
    return 0


def archive(args: argparse.Namespace) -> int:
    """Archive the finished runs among the given folders."""
    _check_runs(args)
    runs = _finished([load_run(folder) for folder in find_runs(args.runs)])
    folder = args.to / FOLDER
    new = runs if args.replace else [run for run in runs if _is_new(run, folder)]
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for run in new:
            remark = {"note": args.note} if args.note else {}
            described, rounds = texts(replace(run, environment={**run.environment, **remark}))
            # the CSV first: a TOML without it is not a run
            write_bytes(folder / f"{run.spec['id']}.csv", rounds.encode())
            write_bytes(folder / f"{run.spec['id']}.toml", described.encode())
    note(f"archived in {folder}: {len(new)} (there already: {len(runs) - len(new)})")
    return 0


def _finished(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the runs that are over; print a line for every other one."""
    for run in runs:
        if run.result is None:
            rounds = f"{len(run.rows)} of {run.spec['rounds']} rounds"
            note(f"left out: {run.folder} is not over ({rounds})")
    return [run for run in runs if run.result is not None]


def _is_new(run: StoredRun, folder: Path) -> bool:
    """Return whether a run is not archived yet; refuse one that is, with another result."""
    path = folder / f"{run.spec['id']}.toml"
    if not path.exists():
        return True
    # as the archive writes them, without the environment
    archived, new = (texts(replace(each, environment={})) for each in (load_run(path), run))
    if archived != new:
        raise UsageError(
            f"{path} holds the same run with other results; nothing was written; leave the new one "
            "out, or take it with --replace"
        )
    return False
