"""`fedexp reproduce`: a table or figure of the paper, with our numbers next to the published.

`fedexp toy` draws one of them, Figure 2, from any first model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.analysis.plots import check_writable, save
from fedexp.analysis.tables import FORMATS, text_table
from fedexp.cli.many import (
    Many,
    add_jobs_option,
    add_shard_option,
    check_many,
    is_silent,
    run_many,
    workers_on,
)
from fedexp.cli.options import add_out, add_restart, add_root_options, add_watch_options, positive
from fedexp.errors import UsageError, require, unknown_name
from fedexp.options import convert
from fedexp.reproduce import STUDIES
from fedexp.reproduce.from_runs import plan_from, reusable
from fedexp.reproduce.output import check_folder, head_lines, render, write_all
from fedexp.reproduce.study import Job, Plan, Request, Result, make_plan
from fedexp.reproduce.toy import toy_figure, toy_paths
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.spec import Outcome
from fedexp_command import COMMANDS


def add_parser(subparsers: Any) -> None:
    """Add both commands to the sub-parsers of the command line."""
    parser = subparsers.add_parser("reproduce", help=COMMANDS["reproduce"])
    parser.add_argument("what", nargs="?", metavar="WHAT", help="a study; see --list")
    parser.add_argument("--list", action="store_true", help="list the studies and their cost")
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="a task of the study; may be repeated",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="rounds (the paper's number)")
    parser.add_argument("--seeds", type=positive, metavar="N", help="seeds (the paper's number)")
    parser.add_argument(
        "--scale", choices=["full", "small"], default="full", help="small: minutes on a CPU"
    )
    parser.add_argument(
        "--mode", default="paper", choices=["paper", "authors-code"], help="default: paper"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUNS",
        help="run nothing: use the runs in this folder or archive, and list missing ones",
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        metavar="RUNS",
        help="take finished runs from this folder or archive, and execute the others only",
    )
    add_shard_option(parser)
    add_root_options(parser)
    add_restart(parser, "discard what is stored of these runs, and run them again")
    add_watch_options(parser)
    add_out(parser, "folder for the results (reproduce-WHAT)")
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="format of the printed table"
    )
    add_jobs_option(parser)
    parser.add_argument("--device", metavar="D", help="cpu (default) or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bf16"], help="arithmetic inside the model"
    )
    parser.set_defaults(run=run, many=True)

    parser = subparsers.add_parser("toy", help=COMMANDS["toy"])
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="default: 30")
    parser.add_argument(
        "--start", default="0,0", metavar="W1,W2", help="first model, e.g. --start=-1,2 (0,0)"
    )
    add_out(parser, "the figure (toy.png)")
    parser.set_defaults(run=draw_toy)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    if args.what is None:
        raise UsageError("name a study, e.g. fedexp reproduce toy; --list names them all")
    if args.what not in STUDIES:
        raise unknown_name("study", args.what, STUDIES)
    check_many(args)
    folder = args.out or Path(f"reproduce-{args.what}")
    if args.source is not None:
        require(args.shard is None, "--from runs nothing that could be shared; leave --shard out")
        require(not args.restart, "--from runs nothing; leave --restart out")
        require(args.reuse is None, "--from runs nothing; leave --reuse out")
        if is_silent():
            return 0
        return _conclude(*_stored(args), folder, args.format)
    plan = make_plan(STUDIES[args.what], _request(args))
    check_folder(folder)
    if plan.shrunk:
        for line in head_lines(plan)[: len(plan.shrunk) + 1]:
            print(f"fedexp: {line}", file=sys.stderr)
    known = _reused(plan, args.reuse)
    missing = [job for job in plan.jobs if job not in known]
    if missing or not known:
        outcomes, status = run_many(args, _many(plan, missing, args))
        if outcomes is None:
            return status
        known |= dict(zip(missing, outcomes, strict=True))
    return _conclude(plan, [Result(job, known[job]) for job in plan.jobs], folder, args.format)


def _reused(plan: Plan, source: Path | None) -> dict[Job, Outcome]:
    """Return the outcomes of the jobs that were run before, and report their number."""
    if source is None:
        return {}
    found = reusable(plan, _load(source))
    if not is_silent():
        taken = f"{len(found)} of {len(plan.jobs)} runs are taken from {source}"
        print(f"fedexp: {taken}", file=sys.stderr)
    return found


def _load(source: Path) -> list[StoredRun]:
    require(source.is_dir(), f"{source}: no such folder; name a folder of runs")
    return [load_run(folder) for folder in find_runs([source])]


def _stored(args: argparse.Namespace) -> tuple[Plan, list[Result]]:
    """Return the plan and results of stored runs, without data and training."""
    require(args.seeds is None, "--from takes the seeds that are there; leave --seeds out")
    plan, results = plan_from(STUDIES[args.what], _request(args), _load(args.source))
    if not plan.tasks:
        raise UsageError(
            f"{args.source} holds no runs of {args.what} (mode {args.mode}, {plan.rounds} rounds); "
            f"make them with: fedexp reproduce {args.what} --mode {args.mode}"
        )
    return plan, results


def _conclude(plan: Plan, results: list[Result], folder: Path, format: str) -> int:
    """Measure, write all files and print the table."""
    check_folder(folder)
    findings = plan.study.measure(plan, results)
    written = write_all(folder, plan, findings)
    _warn_of_divergence(results)
    print(render(plan, findings, format), end="")
    names = ", ".join(path.name for path in written)
    print(f"fedexp: wrote {names} to {folder}", file=sys.stderr)
    return 0


def _request(args: argparse.Namespace) -> Request:
    return Request(
        rounds=args.rounds,
        seeds=args.seeds,
        tasks=tuple(dict.fromkeys(args.task)),
        small=args.scale == "small",
        mode=args.mode,
        device=args.device,
        precision=args.precision,
    )


def _many(plan: Plan, own: Sequence[Job], args: argparse.Namespace) -> Many:
    """Return the runs; finished ones are read from disk, interrupted ones are resumed."""
    specs = [job.spec for job in own]
    names = {job.spec: f"{job.task} {job.series} s{job.spec.seed}" for job in own}
    jobs = args.jobs or workers_on(args.device)
    return Many(specs, plan.study.name, plan.rounds, names.__getitem__, jobs)


def _warn_of_divergence(results: list[Result]) -> None:
    for result in results:
        if (at := result.outcome.diverged_at) is not None:
            job = result.job
            name = f"{job.task} {job.series} (seed {job.spec.seed})"
            print(f"fedexp: warning: {name} diverged at round {at}", file=sys.stderr)


def _list() -> int:
    for name, study in STUDIES.items():
        print(f"{name:<18} {study.title}")
        tasks = f"tasks {', '.join(study.tasks)}; " if len(study.tasks) > 1 else ""
        print(f"{'':<18} {tasks}{study.cost()}")
    print("\n--scale small shrinks a study to minutes on a CPU; the output states how")
    return 0


def draw_toy(args: argparse.Namespace) -> int:
    """Draw the iterates of the toy problem; print their distance to the optimum."""
    figure = args.out or Path("toy.png")
    check_writable(figure)
    start = convert(args.start, tuple[float, float], "--start")
    paths = toy_paths(start, args.rounds)
    save(toy_figure(paths), figure)
    shown = sorted({0, *(args.rounds * k // 3 for k in (1, 2, 3))})
    cells = [
        [name, *(f"{path.sq_distance[at]:.2g}" for at in shown), f"{path.loss[-1]:.2g}"]
        for name, path in paths.items()
    ]
    print("squared distance to the optimum, by round")
    print(text_table(["", *(f"{at}" for at in shown), "loss at the end"], cells))
    print(f"wrote {figure}", file=sys.stderr)
    return 0
