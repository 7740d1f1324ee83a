"""`fedexp tune`: search for the best step sizes, or for eps."""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedexp import api
from fedexp.analysis.plots import check_writable
from fedexp.analysis.tables import render_table
from fedexp.cli import options
from fedexp.cli.compare import bar_of, stopped_status
from fedexp.errors import require
from fedexp.experiment import experiments
from fedexp.plain import file_name
from fedexp.tuning.grids import Point, parse_grid
from fedexp.tuning.results import Tuning, heading, table_of
from fedexp.tuning.search import FREE_TRIALS, Protocol, Search

WAITING = "the last trials are running in other processes; waiting for them"


def run(args: argparse.Namespace) -> int:
    """Tune the algorithms one after another; print their table and draw pictures."""
    _check(args)
    settings: Any = options.settings_of(args)
    chosen = experiments(args.task, options.listed(args.algorithm), args.seed or 0, settings)
    grid, trials = parse_grid(args.grid) or None, args.trials or FREE_TRIALS
    protocol: Protocol = "epsilon" if args.epsilon else args.protocol
    searches = [Search.of(experiment, grid, protocol, trials) for experiment in chosen]
    pictures = [_picture(args, search) for search in searches]
    try:
        tunings = [
            api.run_search(
                search,
                jobs=args.jobs,
                runs=options.root_of(args),
                progress=bar_of(args, partial(_title, search), _values),
                on_wait=cache(partial(options.note, WAITING)),  # printed once
            )
            for search in searches
        ]
    except api.Interrupted as stopped:
        return stopped_status(stopped)
    if options.is_silent():
        return 0
    _report(args, tunings)
    for picture, tuning in zip(pictures, tunings, strict=True):
        if picture is not None:
            tuning.plot(picture)
            print(f"wrote {picture}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other, before data are read."""
    options.check_jobs(args.jobs, args.device)
    options.check_format(args)
    free, names = args.protocol == "free", options.listed(args.algorithm)
    require(args.trials is None or free, "--trials is for --protocol free; a grid has its points")
    several = bool(args.grid) + free + args.epsilon > 1
    require(not several, "--grid, --protocol free and --epsilon exclude each other; choose one")
    require(bool(names), "--algorithm needs a name; `fedexp algorithms` lists them")
    require(len(names) == 1 or not args.epsilon, "--epsilon takes one --algorithm at a time")


def _picture(args: argparse.Namespace, search: Search) -> Path | None:
    """Return the path of the picture; only a search over two options has one."""
    if len(search.values) != 2:
        require(args.out is None, "a picture needs a search over two options; leave --out out")
        return None
    names = search.base.names
    usual = Path(f"tune-{file_name(names.task)}-{file_name(names.algorithm)}.png")
    path: Path = args.out or usual
    check_writable(path)
    return path


def _title(search: Search, grid: api.Grid) -> str:
    return f"{grid.task} {search.base.names.algorithm}"


def _values(point: Point) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in point.items())


def _report(args: argparse.Namespace, tunings: list[Tuning]) -> None:
    if args.json:
        base = tunings[0].search.base
        head = {"task": base.names.task, "rounds": base.rounds, "seed": base.seed}
        algorithms = [tuning.to_json() for tuning in tunings]
        print(json.dumps({**head, "algorithms": algorithms}, allow_nan=False))
        return
    text = args.format == "text"
    where = sys.stdout if text else sys.stderr
    if text and not args.epsilon:
        print(heading(tunings))
    print(render_table(args.format, *table_of(tunings, args.format == "csv")))
    for tuning in tunings:
        if args.epsilon:
            print(tuning.explanation, file=where)
        else:
            for line in tuning.remarks:
                print(f"{tuning.search.base.names.algorithm}: {line}", file=sys.stderr)
        print(tuning.command, file=where)
