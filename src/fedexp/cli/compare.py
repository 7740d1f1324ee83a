"""`fedexp compare`: several algorithms over several seeds, a table and a picture."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from fedexp.cli.options import add_out, add_run_options, spec_of
from fedexp.cli.progress import progress_bar
from fedexp.errors import UsageError, require
from fedexp.experiments.canvas import check_writable, save
from fedexp.experiments.compare import Line, Outcome, Row, run_all, summarise
from fedexp.experiments.figures import comparison_figure
from fedexp.experiments.spec import Run, Spec
from fedexp.experiments.tables import comparison_table, diverged_lines, text_table

DEFAULT = "fedexp,scaffold,fedadagrad,fedprox,fedavg"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compare", help="compare algorithms over seeds")
    add_run_options(parser)
    parser.add_argument(
        "--algorithms", default=DEFAULT, metavar="A,B,...", help=f"default: {DEFAULT}"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--target", type=float, metavar="ACC", help="accuracy (or loss) to reach")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (all cores)")
    add_out(parser, "the picture (compare-TASK.png)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = [name.strip() for name in args.algorithms.split(",") if name.strip()]
    require(bool(names), "--algorithms needs at least one name; `fedexp algorithms` lists them")
    require(args.seeds >= 1, f"--seeds must be at least 1, not {args.seeds}")
    specs = [
        spec_of(args, name, seed) for name in dict.fromkeys(names) for seed in range(args.seeds)
    ]
    picture = args.out or Path(f"compare-{args.task}.png")
    prepared = [spec.prepare() for spec in specs if spec.seed == 0]
    for each in prepared:
        each.records()  # checks its arguments; runs nothing
    first = prepared[0]
    check_writable(picture)
    target = _target(args.target, first)
    outcomes = _run(specs, args.jobs or _cores(), first)
    lines = summarise(outcomes, first.task.metric, target)
    save(comparison_figure(outcomes, first.task.metric, target, _title(first, args.seeds)), picture)
    _report(args, first, lines, outcomes, target)
    print(f"wrote {picture}", file=sys.stderr)
    return 0


def _run(specs: list[Spec], jobs: int, first: Run) -> list[Outcome]:
    title = f"{first.spec.task}, {len(specs)} runs"
    with progress_bar(title, first.rounds * len(specs)) as bar:

        def on_round(spec: Spec, row: Row) -> None:
            bar(row)

        return run_all(specs, jobs, on_round)


def _report(
    args: argparse.Namespace,
    first: Run,
    lines: list[Line],
    outcomes: list[Outcome],
    target: float | None,
) -> None:
    metric = first.task.metric
    for line in diverged_lines(outcomes):
        print(f"fedexp: warning: {line}", file=sys.stderr)
    if args.json:
        rows = [{**vars(line), "mean_rounds": line.mean_rounds} for line in lines]
        head = {"task": args.task, "metric": metric, "target": target, "rounds": first.rounds}
        print(json.dumps({**head, "seeds": args.seeds, "algorithms": rows}))
        return
    print(_title(first, args.seeds))
    print(text_table(*comparison_table(lines, metric, target, first.rounds)))


def _title(first: Run, seeds: int) -> str:
    clients = first.task.train.clients
    cohort = first.cohort or clients
    plural = "seed" if seeds == 1 else "seeds"
    return (
        f"{first.spec.task}: {first.rounds} rounds, {cohort} of {clients} clients a round, "
        f"{seeds} {plural}"
    )


def _target(given: float | None, first: Run) -> float | None:
    """The target; an accuracy above 1 is taken as percent."""
    if given is None:
        return first.task.target
    if first.task.metric.endswith("accuracy") and given > 1:
        given /= 100
    if not given > 0 or (first.task.metric.endswith("accuracy") and given > 1):
        raise UsageError("--target must be a positive loss, or an accuracy up to 1 (or 100 %)")
    return given


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
