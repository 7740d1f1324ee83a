"""`fedexp archive`: runs as small files to keep with a project, without states and models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError, require
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.files import telling, write_bytes
from fedexp.runs.read import Parts, texts

FOLDER = "runs"  # in the archive


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "archive", help="keep finished runs for good: a small CSV and TOML each"
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them"
    )
    parser.add_argument(
        "--to", type=Path, default=Path("results"), metavar="DIR", help="the archive (results)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="write over runs that are archived with other rounds"
    )
    parser.add_argument(
        "--note", metavar="TEXT", help="what to know of how they were made, e.g. a shared GPU"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for path in args.runs:
        require(path.is_dir(), f"{path}: no such folder; name a run folder, or a folder of runs")
    runs = _finished([load_run(folder) for folder in find_runs(args.runs)])
    folder = args.to / FOLDER
    new = runs if args.replace else [each for each in runs if _is_new(each, folder)]
    with telling(folder):
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
    """The runs that are over; the others are told of."""
    for each in runs:
        if each.result is None:
            rounds = f"{len(each.rows)} of {each.spec['rounds']} rounds"
            print(f"fedexp: left out: {each.folder} is not over ({rounds})", file=sys.stderr)
    return [each for each in runs if each.result is not None]


def _files(run: StoredRun, note: str | None = None) -> dict[str, str]:
    """The CSV first: a TOML without it would be no run."""
    assert run.result is not None
    about = {**run.environment, **({"note": note} if note else {})}
    described, rounds = texts(Parts(run.spec, about, run.rows, run.result))
    return {f"{run.spec['id']}.csv": rounds, f"{run.spec['id']}.toml": described}


def _is_new(run: StoredRun, folder: Path) -> bool:
    """A run that was made twice has two results; which one counts is not decided in silence."""
    path = folder / f"{run.spec['id']}.toml"
    if not path.exists():
        return True
    if _computed(load_run(path)) != _computed(run):
        raise UsageError(
            f"{path} holds another making of the same run; nothing was written; leave the new one "
            "out, or take it with --replace"
        )
    return False


def _computed(run: StoredRun) -> tuple[str, str]:
    """What came out of a run, wherever and whenever, as the archive writes it."""
    assert run.result is not None
    return texts(Parts(run.spec, {}, run.rows, run.result))
