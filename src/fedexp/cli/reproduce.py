"""`fedexp reproduce`: a table or figure of the paper, with our numbers next to the published.

`fedexp toy` draws one of them, Figure 2, from any first model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedexp import api
from fedexp.analysis.plots import check_writable, save
from fedexp.analysis.tables import text_table
from fedexp.cli.compare import bar_of, is_missing, note_busy, stopped_status
from fedexp.cli.options import check_many, is_silent, note, root_of, shard_of
from fedexp.errors import UsageError, check_name, require
from fedexp.reproduce import STUDIES
from fedexp.reproduce.from_runs import plan_from, reusable
from fedexp.reproduce.output import check_folder, head_lines, render, write_all
from fedexp.reproduce.study import Job, Plan, Request, Result, make_plan
from fedexp.reproduce.toy import toy_figure, toy_paths
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.spec import Outcome
from fedexp.text import convert


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    if args.what is None:
        raise UsageError("name a study, e.g. fedexp reproduce toy; --list names them all")
    check_name("study", args.what, STUDIES)
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
            note(line)
    known = _reused(plan, args.reuse)
    missing = [job for job in plan.jobs if job not in known]
    try:
        outcomes = _run(args, plan, missing) if missing else []  # Figure 2 needs none
    except api.Interrupted as stopped:
        return stopped_status(stopped)
    if is_silent() or is_missing(args, len(outcomes), len(missing)):
        return 0
    known |= dict(zip(missing, outcomes, strict=True))
    return _conclude(plan, [Result(job, known[job]) for job in plan.jobs], folder, args.format)


def _reused(plan: Plan, source: Path | None) -> dict[Job, Outcome]:
    """Return the outcomes of the jobs that were run before, and report their number."""
    if source is None:
        return {}
    reused = reusable(plan, _load(source))
    if not is_silent():
        note(f"{len(reused)} of {len(plan.jobs)} runs are taken from {source}")
    return reused


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
    note(f"wrote {', '.join(path.name for path in written)} to {folder}")
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


def _run(args: argparse.Namespace, plan: Plan, missing: Sequence[Job]) -> list[Outcome]:
    """Execute runs; finished ones are read from disk, interrupted ones are resumed."""
    shard = shard_of(args)

    def title(grid: api.Grid) -> str:
        return f"{plan.study.name}, {grid.runs} runs"

    names = {job.experiment: f"{job.task} {job.series} s{job.experiment.seed}" for job in missing}
    return api.run_grid(
        [job.experiment for job in missing],
        jobs=args.jobs,
        runs=root_of(args),
        progress=bar_of(args, title, names.__getitem__, shard, len(missing)),
        restart=args.restart,
        checkpoint_every=args.checkpoint_every,
        shard=shard,
        on_busy=None if shard is None else note_busy,
    )


def _warn_of_divergence(results: list[Result]) -> None:
    for result in results:
        if (at := result.outcome.diverged_at) is not None:
            job = result.job
            name = f"{job.task} {job.series} (seed {job.experiment.seed})"
            note(f"warning: {name} diverged at round {at}")


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
