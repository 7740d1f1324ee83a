"""`fedexp run`: one algorithm on one task. `fedexp resume`: continue a run from its folder."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from shlex import quote

from fedexp import api
from fedexp.api import RunResult
from fedexp.cli.options import experiment_of, is_silent, note, refuse_if_lost, root_of
from fedexp.cli.progress import Bar, Diagnostics, describe, watch
from fedexp.distributed import ranks
from fedexp.errors import FedExPError, require
from fedexp.experiment import Experiment, Row
from fedexp.runs import is_run, read_spec
from fedexp.runs.execute import extend_run
from fedexp.runs.folder import RunFolder
from fedexp.runs.loggers import logger_named
from fedexp.runs.spec import folder_of, without_id


def train(args: argparse.Namespace) -> int:
    """Run, resume, or return what is stored; then report."""
    is_new = args.command == "run"
    experiment, folder = _described(args) if is_new else _stored(args)
    if experiment is None:  # a run on Flower, which its app trains
        return 0
    names = [] if folder is None or is_silent() else args.log
    title = f"{experiment.names.task} {experiment.names.algorithm}"
    metric = experiment.problem.metric
    try:
        with watch(title, experiment.length, quiet=args.quiet, metric=metric) as bar:
            progress = _Progress(experiment, bar)
            result = api.run(
                experiment,
                runs=None,
                folder=folder,
                restart=args.restart,
                reopen=not is_new and args.reopen,
                checkpoint_every=args.checkpoint_every,
                client_store=args.client_states,
                loggers=[logger_named(name, folder) for name in names if folder],
                on_round=progress.on_round,
                on_open=progress.on_open,
            )
    except api.Interrupted as stopped:
        refuse_if_lost()
        again = f"continue with: fedexp resume {quote(str(folder))}"
        note(f"stopped after round {stopped.round}; {again}")
        return stopped.status
    if not any(row["clients"] for row in result.rows):
        raise FedExPError("no client update was finite in any round; lower local.lr or clip")
    _report(args.json, result)
    return 0


def _described(args: argparse.Namespace) -> tuple[Experiment, Path | None]:
    """Return the experiment that the options describe, and its folder if it is stored."""
    require(not (args.out and args.no_save), "--out and --no-save exclude each other; choose one")
    root, experiment = root_of(args), experiment_of(args)
    folder = args.out or (root and folder_of(experiment, root))
    require(
        folder is not None or not (args.log or args.restart),
        "--log and --restart need a run that is stored; leave --no-save out",
    )
    if args.restart and not is_silent():  # the first rank alone reads the folder
        stored = folder is not None and is_run(folder)
        require(stored, f"{folder} holds no run; leave --restart out to begin")
    return experiment, folder


def _stored(args: argparse.Namespace) -> tuple[Experiment | None, Path]:
    """Return the experiment of a run folder; None for a run on Flower, which is reopened here."""
    group = ranks()
    if args.rounds is not None:
        require(not (args.reopen or args.restart), "--rounds excludes --reopen and --restart")
        extend = partial(extend_run, args.folder, args.rounds)
        args.folder = extend() if group is None else group.compute_on_first(extend)
    read = partial(read_spec, args.folder)
    spec = without_id(read() if group is None else group.compute_on_first(read))
    require(not (args.reopen and args.restart), "--reopen and --restart exclude each other")
    if spec["engine"] != "flower":
        return Experiment.of(spec), args.folder
    require(
        args.reopen,
        f"{args.folder} is a run on Flower; start its app again, with the same checkpoint",
    )
    with RunFolder(args.folder, spec, {}) as run_folder:
        round = run_folder.reopen()
    require(
        round is not None, f"{args.folder} has not diverged; start its app again to continue it"
    )
    again = "start its app again, with the same checkpoint"
    note(f"{args.folder} continues after round {round}: {again}")
    return None, args.folder


class _Progress:
    """Passes rows to the progress bar and prints diagnostics; stored rows come first."""

    def __init__(self, experiment: Experiment, bar: Bar) -> None:
        self._before, self._bar = 0, bar
        self._diagnostics = Diagnostics(experiment.setup.options())

    def on_open(self, folder: Path, rounds: int, over: bool) -> None:
        self._before = rounds
        if rounds and not over:
            self._bar.skip(rounds)
            note(f"{folder} resumes after round {rounds}")

    def on_round(self, row: Row) -> None:
        if row["round"] > self._before:
            self._bar(row)
        for line in self._diagnostics.see(row):
            note(f"note: {line}")


def _report(as_json: bool, result: RunResult) -> None:
    last, outcome, spec = result.last, result.outcome, result.outcome.spec
    if as_json:
        head = {name: spec[name] for name in ("task", "algorithm", "seed")}
        ended = {"rounds": last["round"], "seconds": outcome.seconds, "status": outcome.status}
        place = {"folder": str(result.folder) if result.folder else None}
        print(json.dumps({**head, **ended, **place, "final": last}))
        return
    took = f"{last['round']} rounds in {outcome.seconds:.1f} s"
    numbers = describe(last, result.experiment.problem.metric)
    print(f"{spec['algorithm']} on {spec['task']}: {took}  {numbers}")
    if outcome.status == "target":
        note(f"stopped at the target {spec['stop_at']:g}")
    if last["dropped"]:
        note(f"{last['dropped']} client update(s) of the last round were dropped")
    if result.folder and outcome.stored == len(outcome.rows):
        note(f"nothing to do: {result.folder} was finished before (--restart runs it again)")
    elif result.folder:
        note(f"wrote {result.folder}")
