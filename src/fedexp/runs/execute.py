"""What in the process decides the last bits of a sum: threads, and torch's deterministic mode.

`execute`: run a spec, or go on with it, or say what came out of it before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedexp.distributed import DistributedGroup, Ranks, check_device
from fedexp.engine.client_store import ClientStore
from fedexp.errors import DivergedError, UsageError, require
from fedexp.runs.distributed_run import Lead, check_alike, follow
from fedexp.runs.files import Row, telling
from fedexp.runs.folder import RESULT, RunFolder, check_content, warn_of_version
from fedexp.runs.journal import Keeping, Session, Stopped, remaining
from fedexp.runs.loggers import Consumer, Guarded
from fedexp.runs.read import load_run
from fedexp.runs.spec import (
    OnRound,
    Outcome,
    Run,
    Spec,
    check_same,
    folder_of,
    frozen,
    is_run,
    read_spec,
)

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads; put back what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use only operations that give the same bits every time; put back what was set.

    On the CPU they all do. cuBLAS reads its variable when it is first used, so a process that has
    used the GPU before should have set CUBLAS_WORKSPACE_CONFIG=:4096:8 itself.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    modes = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    workspace = os.environ.get(CUBLAS)
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).strip().split(". ")[0]
        raise UsageError(f"{reason}; leave --deterministic out, or train on the CPU") from None
    finally:
        torch.use_deterministic_algorithms(modes[0])
        cudnn.deterministic, cudnn.benchmark = modes[1:]
        if workspace is None:
            os.environ.pop(CUBLAS, None)


def execute(
    spec: Spec,
    root: Path | None,
    on_round: OnRound,
    *,
    run: Run | None = None,
    folder: Path | None = None,
    ranks: Ranks | None = None,
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
        ranks: those that share the work; all of them call this. The first alone touches the folder,
            and `on_round` is sure to be told of rows on the first alone.
        keeping: see `Keeping`.
    """
    run = run or spec.prepare()
    how = _shared(Keeping(**keeping), run, ranks)
    where = folder or (folder_of(run, root) if root is not None else None)
    number = 1 if run.is_small else torch.get_num_threads()
    with deterministic(spec.deterministic), threads(number):
        if where is None:
            return _in_memory(run, on_round, how)
        if how.process_group is not None and not how.process_group.ranks.is_first:
            return follow(run, where, how, how.process_group)
        lead = Lead(ranks)
        with lead.telling():
            if how.restart and folder is not None:
                require(is_run(where), f"{where} holds no run; leave --restart out to begin")
            return lead.over(_kept(run, where, on_round, how, lead))


def _shared(how: Keeping, run: Run, ranks: Ranks | None) -> Keeping:
    """With others, a wish to stop travels with the sums, so that all stop after the same round."""
    if ranks is None:
        return how
    check_device(run.spec.device)
    check_alike(run, ranks)
    process_group = DistributedGroup(ranks, how.stop)
    return replace(how, process_group=process_group, stop=lambda: process_group.stopping)


def _kept(run: Run, where: Path, on_round: OnRound, how: Keeping, lead: Lead) -> Outcome:
    if found := _over(run, where, on_round, how):
        return found
    if not is_run(where):
        run.records()  # checks its arguments before anything is on the disk
    with RunFolder.of(where, run, how.restart) as held:
        if how.reopen:
            held.reopen()
        # another process may have brought it to its end since
        return _over(run, where, on_round, how) or _on_disk(run, held, on_round, how, lead)


def _over(run: Run, where: Path, on_round: OnRound, how: Keeping) -> Outcome | None:
    """What came out of a run that is over, told row by row; nothing where it is to be restarted."""
    found = None if how.restart else stored_outcome(run, where)
    if found is not None and not (how.reopen and found.diverged_at is not None):
        how.on_open(where, len(found.rows), True)
        for row in found.rows:
            on_round(run.spec, row)
        return found
    return None


def stored_outcome(run: Run, folder: Path) -> Outcome | None:
    """What came out of a run that is over; None where there is still something to do.

    Refuses a run that has the same name but is made from something else.
    """
    if not (folder / RESULT).exists() or not is_run(folder):
        return None
    check_same(read_spec(folder), frozen(run), folder)
    warn_of_version(folder)
    check_content(folder, run.fingerprint)
    return replace(load_run(folder).outcome(), spec=run.spec)


def _in_memory(run: Run, on_round: OnRound, how: Keeping) -> Outcome:
    began = time.perf_counter()
    rows: list[Row] = []
    diverged: DivergedError | None = None
    try:
        keep = ClientStore(how.client_store)
        for record in remaining(run, None, rows, keep, how.process_group):
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


def _on_disk(run: Run, held: RunFolder, on_round: OnRound, how: Keeping, lead: Lead) -> Outcome:
    # ranks share the cores of a machine, however many threads a lone process began with
    number = held.threads() if how.process_group is None else torch.get_num_threads()
    with threads(number), closing(_session(run, held, how)) as session:
        if session.resumed_from:
            with telling(held.path):
                held.note_resumed(session.resumed_from)
        how.on_open(held.path, session.resumed_from, False)
        audience = [_guarded(consumer) for consumer in how.consumers]
        for consumer in audience:
            consumer.begin(frozen(run), session.resumed_from)
        lead.opened(session.state, session.rows)
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
        return Session(run, held, how.checkpoint_every, how.client_store, how.process_group)


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
