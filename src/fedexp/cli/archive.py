"""`fedexp archive`: finished runs as small files for a repository, without states and models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError, require
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.files import disk_errors, write_bytes
from fedexp.runs.read import Parts, texts

FOLDER = "runs"  # in the archive


def add_parser(subparsers: Any) -> None:
    """Add the command to the sub-parsers of the command line."""
    parser = subparsers.add_parser(
        "archive", help="store finished runs for good: a small CSV and TOML each"
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them"
    )
    parser.add_argument(
        "--to", type=Path, default=Path("results"), metavar="DIR", help="the archive (results)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="overwrite runs that are archived with other rounds"
    )
    parser.add_argument(
        "--note", metavar="TEXT", help="remark on how they were run, e.g. on a shared GPU"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Archive the finished runs among the given folders."""
    for path in args.runs:
        require(path.is_dir(), f"{path}: no such folder; name a run folder, or a folder of runs")
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
