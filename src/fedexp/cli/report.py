"""`fedexp report`: stored runs as one HTML page and as figures. `fedexp archive`: as small files.

An archive holds a CSV and a TOML file for each finished run, without states and models, so that it
fits into a repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedexp.analysis.report.filters import Filters
from fedexp.analysis.report.page import count, write_report
from fedexp.analysis.report.sections import Targets
from fedexp.cli.options import listed
from fedexp.errors import UsageError, require
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.read import Parts, texts
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
        on_problem=lambda line: print(f"fedexp: warning: {line}", file=sys.stderr),
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
