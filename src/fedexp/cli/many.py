"""Commands that execute many runs for one table: in this job, over its ranks, or one shard."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedexp.cli.options import positive, root_of
from fedexp.cli.progress import watch
from fedexp.data.sources.image_folder import available_cores
from fedexp.distributed import RankLostError, Ranks, check_device, ranks
from fedexp.distributed.failure import another_failed
from fedexp.errors import require
from fedexp.runs import RunInterrupted, run_all
from fedexp.runs.execute import stop_request
from fedexp.runs.files import Row
from fedexp.runs.pool import Shard, parse_shard, runs_per_rank, stored_outcomes
from fedexp.runs.spec import Outcome, Run, Spec


def add_shard_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="only the I-th of N shares of the runs, for a job array; the last prints the table",
    )


def add_jobs_option(parser: argparse.ArgumentParser, what: str = "runs") -> None:
    text = f"{what} at a time (default: one per core; on a GPU one)"
    parser.add_argument("--jobs", type=positive, metavar="N", help=text)


def check_many(args: argparse.Namespace) -> None:
    """Raise `UsageError` for options that exclude each other, before data are read."""
    shard_of(args)
    require(
        not (args.restart and args.no_save),
        "--restart needs stored runs; leave --no-save out",
    )
    check_jobs(args.jobs, args.device)


def check_jobs(jobs: int | None, device: str | None) -> None:
    """Raise `UsageError` for `--jobs` with ranks, each of which executes one run at a time."""
    if (group := ranks()) is not None:
        require(
            jobs is None,
            f"torchrun started {group.world_size} processes, each for one run; leave --jobs out",
        )
        check_device(device)


def workers_on(device: str | None) -> int:
    """Return how many processes suit a device: one per core of a CPU, one on a GPU.

    >>> workers_on("cuda"), workers_on("cuda:1"), workers_on("cpu") == available_cores()
    (1, 1, True)
    """
    return available_cores() if device in (None, "cpu") else 1


def is_silent() -> bool:
    """Return whether this is a rank other than the first: those print and write nothing."""
    group = ranks()
    return group is not None and not group.is_first


def refuse_if_lost(group: Ranks | None) -> None:
    """Raise `RankLostError` if ranks stopped because one of them failed; it reports the cause."""
    if group is not None and another_failed(group):
        raise RankLostError("another rank has failed")


def shard_of(args: argparse.Namespace) -> Shard | None:
    """Return the shard that `--shard` selects; None for all runs."""
    if args.shard is None:
        return None
    require(
        not args.no_save,
        "--shard needs stored runs, which the other shards read; leave --no-save out, or --shard",
    )
    return parse_shard(args.shard)


@dataclass(frozen=True)
class Many:
    """Runs that belong to one table.

    Attributes:
        specs: the runs, in order.
        title: title of the progress bar.
        rounds: rounds of each run.
        label: returns a short name of a run.
        jobs: runs at a time if there are no ranks.
        metric: of the task's goal.
        built: a run whose task need not be built again.
    """

    specs: Sequence[Spec]
    title: str
    rounds: int
    label: Callable[[Spec], str]
    jobs: int
    metric: str = ""
    built: Run | None = None


def run_many(args: argparse.Namespace, many: Many) -> tuple[list[Outcome] | None, int]:
    """Execute the runs; return their outcomes, in the order of the specs, and the exit status.

    There are no outcomes if the runs were stopped, if other jobs have not finished theirs, and on
    ranks other than the first.
    """
    shard, group = shard_of(args), ranks()
    own = shard.of(many.specs) if shard else list(many.specs)
    if shard:
        _print(f"shard {shard}: {len(own)} of {len(many.specs)} runs")
    with stop_request(listen=root_of(args) is not None) as request:
        try:
            outcomes = _run(args, many, own, request, group)
        except RunInterrupted:
            refuse_if_lost(group)
            _print("stopped; the same command continues")
            return None, request.status
    root = root_of(args)
    if is_silent():
        return None, 0
    if shard is None or root is None:
        return outcomes, 0
    return _joined(args, many.specs, shard, root), 0


def _run(
    args: argparse.Namespace,
    many: Many,
    specs: Sequence[Spec],
    stop: Callable[[], bool],
    group: Ranks | None,
) -> list[Outcome]:
    def on_busy(spec: Spec) -> None:
        _print(f"{many.label(spec)} is left to another process, which is working on it")

    title, shown = f"{many.title}, {len(specs)} runs", runs_per_rank(len(specs), group)
    with watch(title, many.rounds, shown, args.quiet, many.metric) as bar:

        def on_round(spec: Spec, row: Row) -> None:
            bar(row, many.label(spec))

        return run_all(
            specs,
            many.jobs,
            on_round,
            root_of(args),
            ranks=group,
            checkpoint_every=args.checkpoint_every,
            stop=stop,
            on_busy=on_busy if args.shard else None,
            restart=args.restart,
            built=many.built,
        )


def _joined(
    args: argparse.Namespace, specs: Sequence[Spec], shard: Shard, root: Path
) -> list[Outcome] | None:
    """Return the outcomes of all shards; print a line and return None if some are missing."""
    found = dict(stored_outcomes(specs, root, skip_others=args.restart))
    if len(found) == len(specs):
        return [found[k] for k in range(len(specs))]
    missing = len(specs) - len(found)
    verb = "is" if missing == 1 else "are"
    _print(
        f"shard {shard} is done; {missing} of {len(specs)} runs {verb} not there yet: the last "
        "shard prints the table, or the same command without --shard"
    )
    if getattr(args, "json", False):
        print(json.dumps({"shard": str(shard), "runs": len(specs), "missing": missing}))
    return None


def _print(line: str) -> None:
    print(f"fedexp: {line}", file=sys.stderr)
