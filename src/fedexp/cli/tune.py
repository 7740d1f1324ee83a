"""`fedexp tune`: search for the best step sizes, or for eps."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable, save
from fedexp.analysis.tables import FORMATS, render_table
from fedexp.catalogue import split_task
from fedexp.cli.many import add_jobs_option, check_jobs, is_silent, refuse_if_lost, workers_on
from fedexp.cli.options import (
    add_out,
    add_run_options,
    check_format,
    listed,
    positive,
    runs_of,
    seed,
)
from fedexp.cli.progress import watch
from fedexp.distributed import ranks
from fedexp.errors import require
from fedexp.experiment import Row
from fedexp.options import split_task_options
from fedexp.runs import RunInterrupted
from fedexp.runs.execute import StopRequest, stop_request
from fedexp.runs.spec import Run, file_name
from fedexp.tuning import results
from fedexp.tuning.grids import (
    Point,
    Values,
    check_none_fixed,
    free_ranges,
    paper_grid,
    parse_grid,
    without_fixed,
)
from fedexp.tuning.results import tuning_figure
from fedexp.tuning.search import (
    EPS,
    ROUNDS,
    OnRow,
    Progress,
    Protocol,
    Study,
    TrialRunner,
    check_study,
    epsilon_values,
    explain,
    tune,
    tune_epsilon,
)
from fedexp.tuning.store import Trial
from fedexp_command import COMMANDS

TRIALS = 30  # of a free search


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tune", help=COMMANDS["tune"])
    add_run_options(parser, rounds=str(ROUNDS))
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument(
        "--algorithm",
        default="fedexp",
        metavar="A,B,...",
        help="default: fedexp; your own: study.py:NAME",
    )
    parser.add_argument(
        "--protocol",
        choices=["paper", "free"],
        default="paper",
        help="the paper's grids (default), or Optuna's TPE over ranges, with pruning",
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=V,V,...",
        help="a grid of your own instead of the paper's; may be repeated",
    )
    parser.add_argument(
        "--epsilon",
        action="store_true",
        help="the paper's rule of thumb: raise eps until the result drops",
    )
    parser.add_argument("--trials", type=positive, metavar="N", help=f"of a free search ({TRIALS})")
    parser.add_argument("--seed", type=seed, default=0, metavar="S")
    parser.add_argument(
        "--study", type=Path, metavar="FILE", help="where scores are stored (tune-TASK.db)"
    )
    add_jobs_option(parser, "trials")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the table (text)")
    parser.add_argument("--quiet", action="store_true", help="plain lines for a log, no bar")
    add_out(parser, "the picture of two options (tune-TASK-ALGORITHM.png)")
    parser.set_defaults(run=run, many=True)


def run(args: argparse.Namespace) -> int:
    _check(args)
    group = ranks()
    studies = [_study(args, each) for each in _runs(args)]
    pictures = [_picture(args, study) for study in studies]
    with stop_request() as request:
        try:
            if args.epsilon:
                return _epsilon(args, studies[0], request)
            found = [(study, tune(study, _runner(args, study, request))) for study in studies]
        except RunInterrupted:
            refuse_if_lost(group)
            print("fedexp: stopped; the same command continues", file=sys.stderr)
            return request.status
    if is_silent():
        return 0
    _report(args, found)
    for picture, result in zip(pictures, found, strict=True):
        if picture is not None:
            save(tuning_figure(*result), picture)
            print(f"wrote {picture}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise `UsageError` for options that exclude each other, before anything is built."""
    check_jobs(args.jobs, args.device)
    check_format(args)
    free = args.protocol == "free"
    require(args.trials is None or free, "--trials is for --protocol free; a grid has its points")
    require(not (args.grid and free), "--grid and --protocol free exclude each other; choose one")
    require(not (args.epsilon and (args.grid or free)), "--epsilon needs no --grid or --protocol")
    require(args.stop_at is None, "trials run to their end; leave --stop-at out")
    require(
        args.evaluate_every is None,
        "trials are evaluated as their score needs it; leave --evaluate-every out",
    )


def _runs(args: argparse.Namespace) -> list[Run]:
    """Return what all trials of each algorithm have in common, over one task."""
    names = listed(args.algorithm)
    require(bool(names), "--algorithm needs a name; `fedexp algorithms` lists them")
    require(len(names) == 1 or not args.epsilon, "--epsilon takes one --algorithm at a time")
    return runs_of(args, names, args.seed)


def _study(args: argparse.Namespace, run: Run) -> Study:
    values, path = _values(args, run), args.study or Path(f"tune-{file_name(run.spec.task)}.db")
    protocol: Protocol = "epsilon" if args.epsilon else args.protocol
    study = Study(run, protocol, values, path, args.trials or TRIALS)
    check_study(study)
    return study


def _values(args: argparse.Namespace, run: Run) -> Values:
    _, fixed = split_task_options(dict(run.spec.options))
    if args.epsilon or args.grid:
        own = epsilon_values(run) if args.epsilon else parse_grid(args.grid, run.setup)
        return check_none_fixed(own, fixed)
    search = free_ranges if args.protocol == "free" else paper_grid
    return without_fixed(search(run.setup, run.task.sums), fixed)


def _picture(args: argparse.Namespace, study: Study) -> Path | None:
    """Return the path of the picture; only a search over two options has one."""
    if len(study.values) != 2:
        require(args.out is None, "a picture needs a search over two options; leave --out out")
        return None
    path: Path = args.out or Path(
        f"tune-{file_name(study.run.spec.task)}-{file_name(study.run.spec.algorithm)}.png"
    )
    check_writable(path)
    return path


def _runner(args: argparse.Namespace, study: Study, stop: StopRequest) -> TrialRunner:
    jobs = args.jobs or workers_on(args.device)
    return TrialRunner(jobs, ranks(), _progress(study, args.quiet), stop, _waiting_note())


def _progress(study: Study, quiet: bool) -> Progress:
    """Return a context manager that shows a bar, or lines, over the remaining trials."""

    @contextmanager
    def show(left: int) -> Iterator[OnRow]:
        spec = study.run.spec
        with watch(f"{spec.task} {spec.algorithm}", study.run.rounds, left, quiet) as bar:

            def on_row(point: Point, row: Row) -> None:
                bar(row, " ".join(f"{name}={value:.3g}" for name, value in point.items()))

            yield on_row

    return show


def _waiting_note() -> Callable[[], None]:
    """Return a function that prints once that the last trials are running in other processes."""
    lines = ["fedexp: the last trials are running in other processes; waiting for them"]

    def on_wait() -> None:
        if lines:
            print(lines.pop(), file=sys.stderr, flush=True)

    return on_wait


def _report(args: argparse.Namespace, found: list[tuple[Study, list[Trial]]]) -> None:
    if args.json:
        _print_json(args, [results.as_json(s, trials, trials[0].point) for s, trials in found])
        return
    text = args.format == "text"
    if text:
        print(results.heading(found[0][0], sum(len(trials) for _, trials in found)))
    print(render_table(args.format, *results.best_table(found, args.format == "csv")))
    for study, trials in found:
        for line in results.remarks(study, trials):
            print(f"{study.run.spec.algorithm}: {line}", file=sys.stderr)
        print(results.next_command(study, trials[0].point), file=sys.stdout if text else sys.stderr)


def _epsilon(args: argparse.Namespace, study: Study, request: StopRequest) -> int:
    found = tune_epsilon(study, _runner(args, study, request))
    trials, point = results.epsilon_trials(found), {EPS: found.chosen}
    if args.json:
        _print_json(
            args, [{**results.as_json(study, trials, point), "found": explain(found, study)}]
        )
        return 0
    print(render_table(args.format, *results.epsilon_table(study, found, args.format == "csv")))
    where = sys.stdout if args.format == "text" else sys.stderr
    print(explain(found, study), results.next_command(study, point), sep="\n", file=where)
    return 0


def _print_json(args: argparse.Namespace, algorithms: list[dict[str, Any]]) -> None:
    head = {"task": split_task(args.task)[0], "rounds": args.rounds, "seed": args.seed}
    print(json.dumps({**head, "algorithms": algorithms}, allow_nan=False))
