"""`fedexp reproduce`: a table or figure of the paper, ours beside the published figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fedexp.cli.compare import cores
from fedexp.cli.options import add_out, add_root_options, add_watch_options, positive, root_of
from fedexp.cli.progress import watch
from fedexp.cli.signals import StopWish, stop_wish
from fedexp.errors import UsageError, unknown_name
from fedexp.experiments.compare import Row
from fedexp.experiments.spec import Spec
from fedexp.experiments.tables import FORMATS
from fedexp.runs import Stopped, run_all
from fedexp.studies.reproduce.catalog import STUDIES
from fedexp.studies.reproduce.output import check_folder, head_lines, render, write_all
from fedexp.studies.reproduce.plan import make_plan
from fedexp.studies.reproduce.study import Plan, Request, Result


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("reproduce", help="the paper's tables and figures, ours beside")
    parser.add_argument("what", nargs="?", metavar="WHAT", help="a study; --list names them")
    parser.add_argument("--list", action="store_true", help="name the studies and what they cost")
    parser.add_argument(
        "--task", action="append", default=[], metavar="TASK", help="one of the study's tasks"
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="rounds (the paper's number)")
    parser.add_argument("--seeds", type=positive, metavar="N", help="seeds (the paper's number)")
    parser.add_argument(
        "--scale", choices=["full", "small"], default="full", help="small: minutes on a CPU"
    )
    parser.add_argument(
        "--mode", default="paper", choices=["paper", "authors-code"], help="default: paper"
    )
    add_root_options(parser)
    add_watch_options(parser)
    add_out(parser, "folder of the results (reproduce-WHAT)")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of what is printed")
    parser.add_argument("--jobs", type=positive, metavar="N", help="runs at a time")
    parser.add_argument("--device", metavar="D", help="cpu (default) or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bf16"], help="arithmetic inside the model"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    if args.what is None:
        raise UsageError("name a study, e.g. fedexp reproduce toy; --list names them all")
    if args.what not in STUDIES:
        raise unknown_name("study", args.what, STUDIES)
    plan = make_plan(STUDIES[args.what], _request(args))
    folder = args.out or Path(f"reproduce-{args.what}")
    check_folder(folder)
    if plan.shrunk:
        for line in head_lines(plan)[: len(plan.shrunk) + 1]:
            print(f"fedexp: {line}", file=sys.stderr)
    with stop_wish(listen=root_of(args) is not None) as wish:
        try:
            results = _run(plan, args, wish)
        except Stopped:
            print("fedexp: stopped; the same command continues", file=sys.stderr)
            return wish.status
    findings = plan.study.measure(plan, results)
    written = write_all(folder, plan, findings)
    _warn_of_divergence(results)
    print(render(plan, findings, args.format), end="")
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


def _run(plan: Plan, args: argparse.Namespace, wish: StopWish) -> list[Result]:
    """All runs: those that are stored return at once, those that were interrupted go on."""
    specs = [job.spec for job in plan.jobs]
    names = {job.spec: f"{job.task} {job.series} s{job.spec.seed}" for job in plan.jobs}
    alone = args.device not in (None, "cpu")  # a GPU has no room for several
    title = f"{plan.study.name}, {len(specs)} runs"
    with watch(title, plan.rounds, len(specs), args.quiet) as bar:

        def on_round(spec: Spec, row: Row) -> None:
            bar(row, names[spec])

        outcomes = run_all(
            specs,
            args.jobs or (1 if alone else cores()),
            on_round,
            root_of(args),
            checkpoint_every=args.checkpoint_every,
            stop=wish,
        )
    return [Result(*pair) for pair in zip(plan.jobs, outcomes, strict=True)]


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
    print("\n--scale small shrinks a study to minutes on a CPU, and its output says so")
    return 0
