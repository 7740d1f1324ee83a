"""`fedexp compare`: several algorithms over several seeds, a table and a figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from fedexp import api
from fedexp.analysis.plots import check_writable
from fedexp.analysis.tables import warning_lines
from fedexp.catalogue import named_task
from fedexp.cli import options
from fedexp.cli.progress import watch
from fedexp.errors import require
from fedexp.experiment import Experiment, Row
from fedexp.plain import file_name
from fedexp.runs.pool import Shard


def run(args: argparse.Namespace) -> int:
    """Run all algorithms and seeds; print the table and draw the figure."""
    options.check_many(args)
    options.check_format(args)
    names = options.listed(args.algorithms)
    require(bool(names), "--algorithms needs at least one name; `fedexp algorithms` lists them")
    picture = args.out or Path(f"compare-{file_name(named_task(args.task)[0])}.png")
    check_writable(picture)
    total, shard = len(names) * args.seeds, options.shard_of(args)
    try:
        comparison = api.compare(
            args.task,
            names,
            seeds=args.seeds,
            jobs=args.jobs,
            runs=options.root_of(args),
            target=args.target or None,
            smooth=args.smooth,
            restart=args.restart,
            checkpoint_every=args.checkpoint_every,
            progress=bar_of(args, shard=shard, total=total),
            shard=shard,
            on_busy=None if shard is None else note_busy,
            **options.settings_of(args),
        )
    except api.Interrupted as stopped:
        return stopped_status(stopped)
    if options.is_silent() or is_missing(args, len(comparison.outcomes), total):
        return 0
    comparison.plot(picture)
    for line in warning_lines(comparison.outcomes):
        options.note(f"warning: {line}")
    if args.json:
        print(json.dumps(comparison.to_json(), allow_nan=False))
    else:
        if args.format == "text":
            print(comparison.title)
        print(comparison.table(args.format))
    print(f"wrote {picture}", file=sys.stderr)
    return 0


def label(experiment: Experiment) -> str:
    """Return a short name of a run."""
    return f"{experiment.names.algorithm} s{experiment.seed}"


def bar_of(
    args: argparse.Namespace,
    title: Callable[[api.Grid], str] = lambda grid: f"{grid.task}, {grid.runs} runs",
    name: Callable[[Any], str] = label,
    shard: Shard | None = None,
    total: int = 0,
) -> Callable[[api.Grid], AbstractContextManager[Callable[[Any, Row], None]]]:
    """Return what shows a bar, or lines, over all runs of a command.

    Args:
        args: the options of the command.
        title: returns the title of the bar.
        name: returns a short name of a run, or of the values of a trial.
        shard: the share that is run here; None for all runs.
        total: number of runs of all shares.
    """

    @contextmanager
    def show(grid: api.Grid) -> Iterator[Callable[[Any, Row], None]]:
        if shard is not None:
            options.note(f"shard {shard}: {grid.runs} of {total} runs")
        with watch(title(grid), grid.rounds, grid.runs, args.quiet, grid.metric) as bar:
            yield lambda run, row: bar(row, name(run))

    return show


def note_busy(experiment: Experiment) -> None:
    """Print that another process executes a run."""
    options.note(f"{label(experiment)} is left to another process, which is working on it")


def stopped_status(stopped: api.Interrupted) -> int:
    """Print that runs were stopped; return the exit status."""
    options.refuse_if_lost()
    options.note("stopped; the same command continues")
    return stopped.status


def is_missing(args: argparse.Namespace, finished: int, total: int) -> bool:
    """Return whether runs of other shards are missing; print how many."""
    missing = total - finished
    if not missing:
        return False
    verb = "is" if missing == 1 else "are"
    options.note(
        f"shard {args.shard} is done; {missing} of {total} runs {verb} not there yet: the last "
        "shard prints the table, or the same command without --shard"
    )
    if "json" in args and args.json:
        print(json.dumps({"shard": str(options.shard_of(args)), "runs": total, "missing": missing}))
    return True
