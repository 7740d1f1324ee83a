"""`fedexp run`: one algorithm on one task."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from shlex import quote
from typing import Any

from fedexp.cli.options import (
    add_out,
    add_restart,
    add_root_options,
    add_run_options,
    add_watch_options,
    root_of,
    seed,
    spec_of,
)
from fedexp.cli.process import StopWish, stop_wish
from fedexp.cli.progress import Bar, describe, watch
from fedexp.distributed import current
from fedexp.errors import DivergedError, FedExPError, require
from fedexp.runs import Stopped, execute, folder_of
from fedexp.runs.diagnostics import Advice
from fedexp.runs.files import Row
from fedexp.runs.loggers import consumer_named
from fedexp.runs.spec import Outcome, Run, Spec


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("run", help="train with one algorithm")
    add_run_options(parser)
    parser.add_argument("--algorithm", default="fedexp", metavar="A", help="default: fedexp")
    parser.add_argument("--seed", type=seed, default=0, metavar="S")
    add_root_options(parser)
    add_out(parser, "the run's own folder, instead of one in ROOT")
    add_training_options(parser)
    parser.set_defaults(run=run, many=True, reopen=False)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What `fedexp run` and `fedexp resume` share."""
    add_watch_options(parser)
    add_restart(parser, "discard what is stored of this run, and run it again")
    parser.add_argument(
        "--client-states",
        choices=["auto", "memory", "disk"],
        default="auto",
        help="where what clients keep (SCAFFOLD) lies; by default in memory, if it fits",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="WHERE",
        help="tell tensorboard, wandb or mlflow of every round; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    prepared = spec_of(args, args.algorithm, args.seed).prepare()
    root = root_of(args)
    require(not (args.out and args.no_save), "--out and --no-save exclude each other; choose one")
    return train(prepared, args.out or (root and folder_of(prepared, root)), args)


def train(prepared: Run, folder: Path | None, args: argparse.Namespace) -> int:
    """Run, resume, or tell what is stored; then report."""
    require(
        folder is not None or not (args.log or args.restart),
        "--log and --restart need a run that is kept; leave --no-save out",
    )
    with stop_wish(listen=folder is not None) as wish:
        try:
            outcome = _execute(prepared, folder, args, wish)
        except Stopped as stopped:
            again = f"continue with: fedexp resume {quote(str(folder))}"
            _say(f"stopped after round {stopped.round}; {again}")
            return wish.status
    _refuse_failures(outcome)
    _report(args, prepared, outcome)
    return 0


def _execute(
    prepared: Run, folder: Path | None, args: argparse.Namespace, wish: StopWish
) -> Outcome:
    among = current()
    told = args.log if among is None or among.is_first else []
    consumers = [consumer_named(name, folder) for name in told] if folder else []
    title = f"{prepared.spec.task} {prepared.spec.algorithm}"
    with watch(title, prepared.rounds, quiet=args.quiet) as bar:
        listener = Listener(prepared, bar)
        return execute(
            prepared.spec,
            None,
            listener.on_round,
            run=prepared,
            folder=folder,
            ranks=among,
            checkpoint_every=args.checkpoint_every,
            restart=args.restart,
            reopen=args.reopen,
            client_store=args.client_states,
            stop=wish,
            consumers=consumers,
            on_open=listener.on_open,
        )


class Listener:
    """Passes rounds on to the bar and gives advice; rounds of before come first, and at once."""

    def __init__(self, prepared: Run, bar: Bar) -> None:
        self._before, self._bar = 0, bar
        self._advice = Advice(prepared.setup.options())

    def on_open(self, folder: Path, rounds: int, over: bool) -> None:
        self._before = rounds
        if rounds and not over:
            self._bar.skip(rounds)
            _say(f"{folder} goes on after round {rounds}")

    def on_round(self, spec: Spec, row: Row) -> None:
        if row["round"] > self._before:
            self._bar(row)
        for line in self._advice.see(row):
            _say(f"note: {line}")


def _refuse_failures(outcome: Outcome) -> None:
    """A run that diverged or never moved has failed, stored or not."""
    if outcome.diverged_at is not None:
        raise DivergedError(outcome.diverged_at, outcome.reason)
    if not any(row["clients"] for row in outcome.rows):
        raise FedExPError("no client update was finite in any round; lower local.lr or clip")


def _report(args: argparse.Namespace, run: Run, outcome: Outcome) -> None:
    last = outcome.rows[-1]
    spec, folder = run.spec, outcome.folder
    if args.json:
        head = {"task": spec.task, "algorithm": spec.algorithm, "seed": spec.seed}
        ended = {"rounds": last["round"], "seconds": outcome.seconds, "status": outcome.status}
        place = {"folder": str(folder) if folder else None}
        print(json.dumps({**head, **ended, **place, "final": last}))
        return
    took = f"{last['round']} rounds in {outcome.seconds:.1f} s"
    print(f"{spec.algorithm} on {spec.task}: {took}  {describe(last)}")
    if outcome.status == "target":
        _say(f"stopped at the target {run.stop_at:g}")
    if last["dropped"]:
        _say(f"{last['dropped']} client update(s) of the last round were dropped")
    if folder and outcome.stored == len(outcome.rows):
        _say(f"nothing to do: {folder} was finished before (--restart runs it again)")
    elif folder:
        _say(f"wrote {folder}")


def _say(line: str) -> None:
    print(f"fedexp: {line}", file=sys.stderr)
