"""`fedexp compare`: several algorithms over several seeds, a table and a picture."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedexp.cli.options import add_out, add_run_options, positive, spec_of
from fedexp.cli.progress import progress_bar
from fedexp.errors import UsageError, require
from fedexp.experiments.canvas import check_writable, save
from fedexp.experiments.catalog import build_task
from fedexp.experiments.compare import Line, Outcome, Row, summarise
from fedexp.experiments.figures import comparison_figure
from fedexp.experiments.pool import run_all
from fedexp.experiments.setup import parse_assignments, share_options, split_task_options
from fedexp.experiments.spec import Run, Spec
from fedexp.experiments.tables import comparison_table, text_table, warning_lines

DEFAULT = "fedexp,scaffold,fedadagrad,fedprox,fedavg"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compare", help="compare algorithms over seeds")
    add_run_options(parser)
    parser.add_argument(
        "--algorithms", default=DEFAULT, metavar="A,B,...", help=f"default: {DEFAULT}"
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--target", type=float, metavar="ACC", help="accuracy (or loss) to reach")
    parser.add_argument("--jobs", type=positive, metavar="N", help="runs at a time (all cores)")
    add_out(parser, "the picture (compare-TASK.png)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    picture = args.out or Path(f"compare-{args.task}.png")
    firsts = _prepare(args)
    first = firsts[0]
    target = _target(args.target, first)
    check_writable(picture)
    if first.is_small:
        torch.set_num_threads(1)
    specs = [replace(run.spec, seed=seed) for run in firsts for seed in range(args.seeds)]
    outcomes = _run(specs, args.jobs or _cores(), first)
    lines = summarise(outcomes, first.task.metric, target)
    save(comparison_figure(outcomes, first.task.metric, target, _title(first, args.seeds)), picture)
    _report(args, first, lines, outcomes, target)
    print(f"wrote {picture}", file=sys.stderr)
    return 0


def _prepare(args: argparse.Namespace) -> list[Run]:
    """The runs of seed 0 of all algorithms, over one task; finds mistakes before anything runs."""
    names = list(dict.fromkeys(name.strip() for name in args.algorithms.split(",") if name.strip()))
    require(bool(names), "--algorithms needs at least one name; `fedexp algorithms` lists them")
    of_task, others = split_task_options(parse_assignments(args.set))
    mine = tuple((f"task.{key}", value) for key, value in of_task.items())
    bare = replace(spec_of(args, names[0], seed=0), options=mine)
    task = build_task(bare.task, of_task, bare.seed, bare.mode)
    setups = {name: replace(bare, algorithm=name).prepare(task).setup for name in names}
    shared = share_options(setups, others)
    specs = [replace(bare, algorithm=n, options=(*mine, *shared[n].items())) for n in names]
    runs = [spec.prepare(task) for spec in specs]
    for each in runs:
        each.records()  # checks its arguments; runs nothing
    return runs


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
    for line in warning_lines(outcomes):
        print(f"fedexp: warning: {line}", file=sys.stderr)
    if args.json:
        rows = [_as_json(line) for line in lines]
        head = {"task": args.task, "metric": metric, "target": target, "rounds": first.rounds}
        print(json.dumps({**head, "seeds": args.seeds, "algorithms": rows}, allow_nan=False))
        return
    print(_title(first, args.seeds))
    print(text_table(*comparison_table(lines, metric, target, first.rounds)))


def _as_json(line: Line) -> dict[str, Any]:
    finals = [value if math.isfinite(value) else None for value in line.finals]
    return {**vars(line), "finals": finals, "mean_rounds": line.mean_rounds}


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
    if not 0 < given < math.inf or (first.task.metric.endswith("accuracy") and given > 1):
        raise UsageError("--target must be a positive loss, or an accuracy up to 1 (or 100 %)")
    return given


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
