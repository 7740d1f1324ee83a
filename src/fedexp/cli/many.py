"""Many runs for one table: all of them here, over the ranks of a job, or a share of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedexp.cli.options import positive, root_of
from fedexp.cli.progress import watch
from fedexp.distributed import RankLostError, Ranks, check_device, ranks
from fedexp.distributed.failure import another_failed
from fedexp.errors import require
from fedexp.runs import Stopped, run_all
from fedexp.runs.execute import stop_request as stop_wish
from fedexp.runs.files import Row
from fedexp.runs.pool import Shard, parse_shard, run_spread, stored, told_of
from fedexp.runs.spec import Outcome, Spec


def add_shard_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="only the I-th of N shares of the runs, for a job array; the last shows the table",
    )


def add_jobs_option(parser: argparse.ArgumentParser, what: str = "runs") -> None:
    said = f"{what} at a time (one a core; on a GPU one)"
    parser.add_argument("--jobs", type=positive, metavar="N", help=said)


def check_many(args: argparse.Namespace) -> None:
    """Mistakes in how runs are shared out, before data are read."""
    shard_of(args)
    require(
        not (args.restart and args.no_save),
        "--restart needs runs that are kept; leave --no-save out",
    )
    check_jobs(args.jobs, args.device)


def check_jobs(jobs: int | None, device: str | None) -> None:
    """Ranks are what runs at a time, each on its own device."""
    if (among := ranks()) is not None:
        require(
            jobs is None,
            f"torchrun started {among.world_size} processes, each for one run; leave --jobs out",
        )
        check_device(device)


def workers_on(device: str | None) -> int:
    """How many processes suit a device: one a core, but a GPU has no room for several.

    >>> workers_on("cuda"), workers_on("cuda:1"), workers_on("cpu") == workers_on(None) == cores()
    (1, 1, True)
    """
    return cores() if device in (None, "cpu") else 1


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_silent() -> bool:
    """Whether this is another rank than the first, which has nothing to show or to write."""
    among = ranks()
    return among is not None and not among.is_first


def refuse_if_lost(among: Ranks | None) -> None:
    """Ranks are stopped, too, where one of them has failed, which has said what there is to say."""
    if among is not None and another_failed(among):
        raise RankLostError("another rank has failed")


def shard_of(args: argparse.Namespace) -> Shard | None:
    """Which share is asked for; None for all runs."""
    if args.shard is None:
        return None
    require(
        not args.no_save,
        "--shard leaves its runs for the others to find; leave --no-save out, or --shard",
    )
    return parse_shard(args.shard)


@dataclass(frozen=True)
class Many:
    """Runs that belong to one table.

    Attributes:
        specs: the runs, in order.
        title: of the bar.
        rounds: rounds of each.
        label: what a run is called, in a few words.
        jobs: how many at a time, where there are no ranks.
    """

    specs: Sequence[Spec]
    title: str
    rounds: int
    label: Callable[[Spec], str]
    jobs: int


def run_many(args: argparse.Namespace, many: Many) -> tuple[list[Outcome] | None, int]:
    """Run what is asked for; every outcome in the order of the specs, and the exit status.

    There are no outcomes where the runs were stopped, where other jobs have some of them still to
    do, and on other ranks than the first, which have nothing to show.
    """
    shard, among = shard_of(args), ranks()
    mine = shard.of(many.specs) if shard else list(many.specs)
    if shard:
        _say(f"shard {shard}: {len(mine)} of {len(many.specs)} runs")
    with stop_wish(listen=root_of(args) is not None) as wish:
        try:
            outcomes = _run(args, many, mine, wish, among)
        except Stopped:
            refuse_if_lost(among)
            _say("stopped; the same command continues")
            return None, wish.status
    root = root_of(args)
    if is_silent():
        return None, 0
    if shard is None or root is None:
        return outcomes, 0
    return _joined(args, many.specs, shard, root), 0


def _run(
    args: argparse.Namespace,
    many: Many,
    mine: Sequence[Spec],
    stop: Callable[[], bool],
    among: Ranks | None,
) -> list[Outcome]:
    def on_busy(spec: Spec) -> None:
        _say(f"{many.label(spec)} is left to another process, which is working on it")

    title, told = f"{many.title}, {len(mine)} runs", told_of(len(mine), among)
    with watch(title, many.rounds, told, args.quiet) as bar:

        def on_round(spec: Spec, row: Row) -> None:
            bar(row, many.label(spec))

        if among is None:
            run = partial(run_all, mine, many.jobs)
        else:
            run = partial(run_spread, mine, among)
        return run(
            on_round,
            root_of(args),
            checkpoint_every=args.checkpoint_every,
            stop=stop,
            on_busy=on_busy if args.shard else None,
            restart=args.restart,
        )


def _joined(
    args: argparse.Namespace, specs: Sequence[Spec], shard: Shard, root: Path
) -> list[Outcome] | None:
    """The outcomes of all shards; None, and a line, where some are not there yet."""
    found = dict(stored(specs, root, lambda spec, row: None, skip_others=args.restart))
    if len(found) == len(specs):
        return [found[k] for k in range(len(specs))]
    missing = len(specs) - len(found)
    verb = "is" if missing == 1 else "are"
    _say(
        f"shard {shard} is done; {missing} of {len(specs)} runs {verb} not there yet: the last "
        "shard shows the table, or the same command without --shard"
    )
    if getattr(args, "json", False):
        print(json.dumps({"shard": str(shard), "runs": len(specs), "missing": missing}))
    return None


def _say(line: str) -> None:
    print(f"fedexp: {line}", file=sys.stderr)
