"""`fedexp compare`: several algorithms over several seeds, a table and a figure."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable, comparison_figure, save
from fedexp.analysis.summary import Line, summarise
from fedexp.analysis.tables import (
    FORMATS,
    comparison_numbers,
    comparison_table,
    render_table,
    warning_lines,
)
from fedexp.cli.many import (
    Many,
    add_jobs_option,
    add_shard_option,
    check_many,
    run_many,
    workers_on,
)
from fedexp.cli.options import (
    add_out,
    add_restart,
    add_root_options,
    add_run_options,
    add_watch_options,
    check_format,
    listed,
    positive,
    runs_of,
)
from fedexp.engine.plan import CohortRule
from fedexp.errors import require
from fedexp.objective import LeastSquares
from fedexp.optional import preload
from fedexp.runs.spec import Outcome, Run, Spec, file_name
from fedexp_command import COMMANDS

DEFAULT = "fedexp,scaffold,fedadagrad,fedprox,fedavg"
QUICK_ROUNDS = 1000


def add_parser(subparsers: Any) -> None:
    """Add the command to the sub-parsers of the command line."""
    parser = subparsers.add_parser("compare", help=COMMANDS["compare"])
    add_run_options(parser)
    parser.add_argument(
        "--algorithms", default=DEFAULT, metavar="A,B,...", help=f"default: {DEFAULT}"
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument(
        "--target",
        type=_targets,
        default=[],
        metavar="ACC,...",
        help="accuracies (or losses) to reach; csv and json have the first one",
    )
    add_jobs_option(parser)
    parser.add_argument(
        "--smooth",
        type=positive,
        default=1,
        metavar="W",
        help="average final values and curves over W rounds (1; the paper's long runs: 20)",
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the table (text)")
    add_shard_option(parser)
    add_root_options(parser)
    add_restart(parser, "discard what is stored of these runs, and run them again")
    add_watch_options(parser)
    add_out(parser, "the figure (compare-TASK.png)")
    parser.set_defaults(run=run, many=True)


def run(args: argparse.Namespace) -> int:
    """Run all algorithms and seeds; print the table and draw the figure."""
    check_many(args)
    check_format(args)
    firsts = _prepare(args)
    task = firsts[0].spec.task
    picture = args.out or Path(f"compare-{file_name(task)}.png")
    first, metric = firsts[0], firsts[0].task.metric
    targets = [first.task.checked_target(each, "--target") for each in args.target]
    target, *further = targets or [first.task.target]
    check_writable(picture)
    preload("matplotlib.figure", "matplotlib.backends.backend_agg")
    specs = [replace(run.spec, seed=seed) for run in firsts for seed in range(args.seeds)]
    jobs = args.jobs or workers_for(first)
    many = Many(specs, task, first.rounds, _label, jobs, metric, first)
    outcomes, status = run_many(args, many)
    if outcomes is None:
        return status
    lines, *more = (
        summarise(outcomes, metric, each, args.smooth, first.task.goal.higher)
        for each in (target, *further)
    )
    title = _title(first, args.seeds)
    others = {each: own for each, own in zip(further, more, strict=True) if each is not None}
    save(comparison_figure(outcomes, metric, target, title, args.smooth, others), picture)
    _report(args, first, lines, outcomes, target, others)
    print(f"wrote {picture}", file=sys.stderr)
    return 0


def _targets(text: str) -> list[float]:
    """Return the numbers of a list, e.g. of "0.92,0.94"."""
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write numbers, e.g. 0.92,0.94, not {text!r}") from None


def _prepare(args: argparse.Namespace) -> list[Run]:
    """Return runs of seed 0 of all algorithms, over one task."""
    names = listed(args.algorithms)
    require(bool(names), "--algorithms needs at least one name; `fedexp algorithms` lists them")
    return runs_of(args, names, seed=0)


def _label(spec: Spec) -> str:
    return f"{spec.algorithm} s{spec.seed}"


def _report(
    args: argparse.Namespace,
    first: Run,
    lines: list[Line],
    outcomes: list[Outcome],
    target: float | None,
    further: dict[float, list[Line]],
) -> None:
    metric = first.task.metric
    for line in warning_lines(outcomes):
        print(f"fedexp: warning: {line}", file=sys.stderr)
    if args.json:
        rows = [_as_json(line) for line in lines]
        head = {"task": first.spec.task, "metric": metric, "target": target, "rounds": first.rounds}
        found: dict[str, Any] = {**head, "seeds": args.seeds, "algorithms": rows}
        if further:
            found["further"] = [
                {"target": each, "algorithms": [_as_json(line) for line in own]}
                for each, own in further.items()
            ]
        print(json.dumps(found, allow_nan=False))
        return
    if args.format == "text":
        print(_title(first, args.seeds))
    higher = first.task.goal.higher
    settings = (args.smooth, higher, further)
    readable = comparison_table(lines, metric, target, first.rounds, *settings)
    table = comparison_numbers(lines, further) if args.format == "csv" else readable
    print(render_table(args.format, *table))


def _as_json(line: Line) -> dict[str, Any]:
    finals = [value if math.isfinite(value) else None for value in line.finals]
    spread = line.spread if line.spread is None or math.isfinite(line.spread) else None
    return {**vars(line), "finals": finals, "spread": spread, "mean_rounds": line.mean_rounds}


def _title(first: Run, seeds: int) -> str:
    clients = first.task.train.clients
    size = CohortRule.of(first.cohort, clients).sample(0, 1, first.task.train).size
    cohort = "some" if callable(first.cohort) else size
    plural = "seed" if seeds == 1 else "seeds"
    return (
        f"{first.spec.task}: {first.rounds} rounds, {cohort} of {clients} clients per round, "
        f"{seeds} {plural}"
    )


def workers_for(first: Run) -> int:
    """Return the number of workers: one for least squares, which end before workers start."""
    quick = isinstance(first.task.objective, LeastSquares) and first.rounds <= QUICK_ROUNDS
    return 1 if quick else workers_on(first.spec.device)
