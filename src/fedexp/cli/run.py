"""`fedexp run`: one algorithm on one task. `fedexp resume`: continue a run from its folder."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from fedexp.cli.options import (
    add_out,
    add_restart,
    add_root_options,
    add_run_options,
    add_watch_options,
    positive,
    root_of,
    seed,
    spec_of,
)
from fedexp.cli.progress import Bar, Diagnostics, describe, watch
from fedexp.errors import DivergedError, FedExPError, require
from fedexp.runs import RunInterrupted, execute, folder_of, read_spec, spec_from
from fedexp.runs.execute import extend_run, stop_request
from fedexp.runs.files import Row
from fedexp.runs.folder import RunFolder
from fedexp.runs.loggers import logger_named
from fedexp.runs.spec import Outcome, Run, Spec
from fedexp_command import COMMANDS


def add_parser(subparsers: Any) -> None:
    """Add both commands to the sub-parsers of the command line."""
    parser = subparsers.add_parser("run", help=COMMANDS["run"])
    add_run_options(parser)
    parser.add_argument(
        "--algorithm",
        default="fedexp",
        metavar="A",
        help="default: fedexp; your own: study.py:NAME",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="S")
    add_root_options(parser)
    add_out(parser, "the run's own folder, instead of one in ROOT")
    _add_training_options(parser)
    parser.set_defaults(run=train, prepare=_from_options, many=True, reopen=False)

    parser = subparsers.add_parser("resume", help=COMMANDS["resume"])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    _add_training_options(parser)
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="more rounds than the run has: it continues in a folder of its own",
    )
    parser.add_argument(
        "--reopen",
        action="store_true",
        help="continue a run that diverged from its last checkpoint (a run on Flower does so "
        "without it, when its app starts again)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=resume, prepare=_from_folder, many=True)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands share."""
    add_watch_options(parser)
    add_restart(parser, "discard what is stored of this run, and run it again")
    parser.add_argument(
        "--client-states",
        choices=["auto", "memory", "disk"],
        default="auto",
        help="where client state (SCAFFOLD) is stored; by default in memory, if it fits",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="WHERE",
        help="log every round to tensorboard, wandb or mlflow; may be repeated",
    )


def _from_options(args: argparse.Namespace) -> tuple[Run, Path | None]:
    """Return the run that the options describe, and its folder."""
    require(not (args.out and args.no_save), "--out and --no-save exclude each other; choose one")
    root = root_of(args)
    run = spec_of(args, args.algorithm, args.seed).prepare()
    return run, args.out or (root and folder_of(run, root))


def _from_folder(args: argparse.Namespace) -> tuple[Run, Path]:
    """Return the run whose spec is stored in the folder."""
    return spec_from(args.spec).prepare(), args.folder


def train(args: argparse.Namespace) -> int:
    """Run, resume, or return what is stored; then report.

    `args.prepare` returns the run and its folder, None to store nothing; `args.ranks` are the
    processes that share the run, None for a single one.
    """
    run, folder = args.prepare(args)
    require(
        folder is not None or not (args.log or args.restart),
        "--log and --restart need a run that is stored; leave --no-save out",
    )
    names = args.log if folder and (args.ranks is None or args.ranks.is_first) else []
    loggers = [logger_named(name, folder) for name in names]
    title = f"{run.spec.task} {run.spec.algorithm}"
    with stop_request(listen=folder is not None) as request:
        try:
            with watch(title, run.rounds, quiet=args.quiet, metric=run.task.metric) as bar:
                progress = _Progress(run, bar)
                outcome = execute(
                    run.spec,
                    None,
                    progress.on_round,
                    run=run,
                    folder=folder,
                    ranks=args.ranks,
                    checkpoint_every=args.checkpoint_every,
                    restart=args.restart,
                    reopen=args.reopen,
                    client_store=args.client_states,
                    stop=request,
                    loggers=loggers,
                    on_open=progress.on_open,
                )
        except RunInterrupted as stopped:
            again = f"continue with: fedexp resume {quote(str(folder))}"
            _print_note(f"stopped after round {stopped.round}; {again}")
            return request.status
    if outcome.diverged_at is not None:  # stored or not, the run has failed
        raise DivergedError(outcome.diverged_at, outcome.reason)
    if not any(row["clients"] for row in outcome.rows):
        raise FedExPError("no client update was finite in any round; lower local.lr or clip")
    _report(args.json, run, outcome)
    return 0


def resume(args: argparse.Namespace) -> int:
    """Continue a run; one on Flower is reopened here, and trained by its app."""
    if args.rounds is not None:
        require(not (args.reopen or args.restart), "--rounds excludes --reopen and --restart")
        extend = partial(extend_run, args.folder, args.rounds)
        args.folder = extend() if args.ranks is None else args.ranks.compute_on_first(extend)
    read = partial(read_spec, args.folder)
    args.spec = read() if args.ranks is None else args.ranks.compute_on_first(read)
    require(not (args.reopen and args.restart), "--reopen and --restart exclude each other")
    if args.spec["engine"] != "flower":
        return train(args)
    require(
        args.reopen,
        f"{args.folder} is a run on Flower; start its app again, with the same checkpoint",
    )
    own = {name: value for name, value in args.spec.items() if name not in ("format", "id")}
    with RunFolder(args.folder, own, {}) as held:
        round = held.reopen()
    require(
        round is not None, f"{args.folder} has not diverged; start its app again to continue it"
    )
    again = "start its app again, with the same checkpoint"
    _print_note(f"{args.folder} continues after round {round}: {again}")
    return 0


class _Progress:
    """Passes rows to the progress bar and prints diagnostics; stored rows come first."""

    def __init__(self, run: Run, bar: Bar) -> None:
        self._before, self._bar = 0, bar
        self._diagnostics = Diagnostics(run.setup.options())

    def on_open(self, folder: Path, rounds: int, over: bool) -> None:
        self._before = rounds
        if rounds and not over:
            self._bar.skip(rounds)
            _print_note(f"{folder} resumes after round {rounds}")

    def on_round(self, spec: Spec, row: Row) -> None:
        if row["round"] > self._before:
            self._bar(row)
        for line in self._diagnostics.see(row):
            _print_note(f"note: {line}")


def _report(as_json: bool, run: Run, outcome: Outcome) -> None:
    last = outcome.rows[-1]
    spec, folder = run.spec, outcome.folder
    if as_json:
        head = {"task": spec.task, "algorithm": spec.algorithm, "seed": spec.seed}
        ended = {"rounds": last["round"], "seconds": outcome.seconds, "status": outcome.status}
        place = {"folder": str(folder) if folder else None}
        print(json.dumps({**head, **ended, **place, "final": last}))
        return
    took = f"{last['round']} rounds in {outcome.seconds:.1f} s"
    print(f"{spec.algorithm} on {spec.task}: {took}  {describe(last, run.task.metric)}")
    if outcome.status == "target":
        _print_note(f"stopped at the target {run.stop_at:g}")
    if last["dropped"]:
        _print_note(f"{last['dropped']} client update(s) of the last round were dropped")
    if folder and outcome.stored == len(outcome.rows):
        _print_note(f"nothing to do: {folder} was finished before (--restart runs it again)")
    elif folder:
        _print_note(f"wrote {folder}")


def _print_note(line: str) -> None:
    print(f"fedexp: {line}", file=sys.stderr)
