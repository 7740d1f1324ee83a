"""`execute`: run a spec, or go on with it, or say what came out of it before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedexp.errors import DivergedError, FedExPError, require
from fedexp.experiments.compare import OnRound, Outcome, Row
from fedexp.experiments.spec import Run, Spec
from fedexp.runs.atomic import telling
from fedexp.runs.consumers import Consumer, Guarded
from fedexp.runs.determinism import deterministic, threads
from fedexp.runs.folder import RESULT, RunFolder, is_run, warn_of_version
from fedexp.runs.session import Session, remaining
from fedexp.runs.spec_file import check_same, frozen, read_spec, run_id
from fedexp.runs.stored import load_run

CHECKPOINT_EVERY = 10.0  # seconds


class Stopped(FedExPError):
    """A run was asked to stop, and did after `round`; it can go on from `folder`."""

    def __init__(self, folder: Path | None, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.folder, self.round = folder, round


@dataclass(frozen=True)
class Keeping:
    """How a run is kept and watched; none of it changes what is computed.

    Args:
        checkpoint_every: seconds between checkpoints; 0 for one a round.
        restart: forget what the folder holds of this run, and begin again.
        stop: asked after every round whether to stop there.
        consumers: told of the beginning, of every new round and of the end.
        on_open: told once of the folder, of how many rounds it holds already, and whether that
            is all of them.
    """

    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    stop: Callable[[], bool] = lambda: False
    consumers: Sequence[Consumer] = ()
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None


def execute(
    spec: Spec,
    root: Path | None,
    on_round: OnRound,
    *,
    run: Run | None = None,
    folder: Path | None = None,
    **keeping: Any,
) -> Outcome:
    """Run a spec to its end, or to where it diverges or reaches what it was to stop at.

    A run that is stored whole is returned at once; one that was interrupted goes on from its last
    checkpoint and ends with the rows and the model of one that never was. `Stopped` is raised
    where `stop` asked for it.

    Args:
        spec: what to run.
        root: the folder of all runs, in which the run's id names its own; None keeps nothing.
        on_round: told of every row in order; rows that are stored already come first, at once.
        run: the spec prepared, where it has been before.
        folder: the run's own folder, instead of one in `root`.
        keeping: see `Keeping`.
    """
    how, run = Keeping(**keeping), run or spec.prepare()
    where = folder or (root / run_id(run) if root is not None else None)
    number = 1 if run.is_small else torch.get_num_threads()
    with deterministic(spec.deterministic), threads(number):
        if where is None:
            return _in_memory(run, on_round, how)
        require(
            not how.restart or is_run(where), f"{where} holds no run; leave --restart out to begin"
        )
        if not how.restart and (found := stored_outcome(run, where)):
            how.on_open(where, len(found.rows), True)
            for row in found.rows:
                on_round(spec, row)
            return found
        if not is_run(where):
            run.records()  # checks its arguments before anything is on the disk
        with RunFolder.of(where, run) as held:
            return _on_disk(run, held, on_round, how)


def stored_outcome(run: Run, folder: Path) -> Outcome | None:
    """What came out of a run that is over; None where there is still something to do."""
    if not (folder / RESULT).exists() or not is_run(folder):
        return None
    check_same(read_spec(folder), frozen(run), folder)
    warn_of_version(folder)
    return replace(load_run(folder).outcome(), spec=run.spec)


def _in_memory(run: Run, on_round: OnRound, how: Keeping) -> Outcome:
    began = time.perf_counter()
    rows: list[Row] = []
    diverged: DivergedError | None = None
    try:
        for record in remaining(run, None, rows):
            rows.append(record.to_json())
            on_round(run.spec, rows[-1])
            if how.stop():
                raise Stopped(None, record.round)
    except DivergedError as error:
        diverged = error
    status = "diverged" if diverged else "target" if run.reached(rows[-1]) else "finished"
    return Outcome(
        run.spec,
        rows,
        time.perf_counter() - began,
        diverged.round if diverged else None,
        status,
        diverged.what if diverged else "",
    )


def _on_disk(run: Run, held: RunFolder, on_round: OnRound, how: Keeping) -> Outcome:
    if how.restart:
        with telling(held.path):
            held.clear()
    with threads(held.threads()), closing(_session(run, held, how)) as session:
        if session.resumed_from:
            with telling(held.path):
                held.note_resumed(session.resumed_from)
        how.on_open(held.path, session.resumed_from, False)
        audience = [_guarded(consumer) for consumer in how.consumers]
        for consumer in audience:
            consumer.begin(frozen(run), session.resumed_from)
        result: dict[str, Any] | None = None
        try:
            result = _train(session, on_round, audience, how)
        finally:
            for consumer in audience:
                consumer.end(result)
    outcome = load_run(held.path).outcome()
    return replace(outcome, spec=run.spec, stored=session.resumed_from)


def _session(run: Run, held: RunFolder, how: Keeping) -> Session:
    """The run where it was left, or at its beginning."""
    with telling(held.path):
        return Session(run, held, how.checkpoint_every)


def _guarded(consumer: Consumer) -> Consumer:
    """One that fails is told of and left out; the run goes on."""
    named = type(consumer).__name__
    return consumer if isinstance(consumer, Guarded) else Guarded(named, consumer)


def _train(
    session: Session, on_round: OnRound, audience: Sequence[Consumer], how: Keeping
) -> dict[str, Any]:
    """The loop: every row is stored before anybody hears of it."""
    spec, path = session.run.spec, session.folder.path
    for row in session.rows:
        on_round(spec, row)
    try:
        for record in session.remaining():
            row = session.keep(record)
            on_round(spec, row)
            for consumer in audience:
                consumer.on_round(row)
            if how.stop() and record.round < session.run.rounds:
                session.checkpoint()
                raise Stopped(path, record.round)
    except DivergedError as error:
        return session.finish(error)
    return session.finish(None)
