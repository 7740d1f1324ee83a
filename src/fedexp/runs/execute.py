"""`execute`: run or resume an experiment, or return its stored result.

All runs take the same path. A finished run is returned from its folder, any other one trains from
its last checkpoint (`_train`): its records go to the `Journal`, to the caller and to the loggers,
in this order. The number of threads, which decides the last bits of a sum, is set for the time of
the run. Ctrl-C and SIGTERM finish the round first (`stop_request`).
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fedexp.distributed import Ranks, launched
from fedexp.engine import Record, SimulationState
from fedexp.engine.client_store import ClientStore
from fedexp.errors import DivergedError, ReasonError, UsageError, require
from fedexp.experiment import Experiment, Resources
from fedexp.objective import Buffers, LoadableObjective, ModuleObjective
from fedexp.plain import id_of
from fedexp.privacy.settings import CentralPrivacy
from fedexp.runs.checkpoint import SLOTS
from fedexp.runs.distributed_run import Leader, follow, join_ranks
from fedexp.runs.fingerprint import fingerprint_of
from fedexp.runs.folder import LOCK, MODEL, RESULT, RunFolder, check_content, warn_of_version
from fedexp.runs.journal import Journal, RunInterrupted
from fedexp.runs.loggers import GuardedLogger
from fedexp.runs.read import load_run
from fedexp.runs.spec import (
    PRUNED,
    SPEC,
    TRIALS,
    OnRound,
    Outcome,
    check_same,
    is_run,
    read_spec,
    spec_text,
    without_id,
)
from fedexp.storage import disk_errors, to_bytes, write_bytes

SMALL_MODEL = 100_000  # parameters


@dataclass(frozen=True)
class Storage:
    """What becomes of what is stored of a run; does not affect results.

    Attributes:
        folder: the run's folder; None stores nothing.
        restart: discard what the folder holds of this run, and start over.
        reopen: continue a run that ended as diverged from its last checkpoint.
        on_open: called once with the folder, the number of rounds it holds, and whether the run is
            over.
        weights: False stores no checkpoint and no model: rows and result only, as of a trial.
    """

    folder: Path | None = None
    restart: bool = False
    reopen: bool = False
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None
    weights: bool = True


def execute(
    experiment: Experiment,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    on_round: OnRound = lambda experiment, row: None,
    resources: Resources = Resources(),  # noqa: B008 (frozen)
    ranks: Ranks | None = None,
) -> Outcome:
    """Run an experiment to its end, or to where it diverges or reaches `stop_at`.

    A finished run is returned at once; an interrupted one resumes from its last checkpoint and ends
    with the rows and the model of one that was never interrupted. `RunInterrupted` is raised where
    `resources.stop` returned True.

    Args:
        experiment: what to run.
        storage: its folder, and what becomes of what that holds.
        on_round: called with every row in order; rows that are stored already come first.
        resources: what the run uses and who watches it.
        ranks: the processes that share the work; all of them call this. The first one alone
            accesses the folder, and `on_round` is guaranteed to be called on the first alone.
    """
    path, group = storage.folder, None
    if ranks is not None:  # a request to stop is reduced with the sums: all stop after one round
        group = join_ranks(experiment, ranks, resources.stop)
        resources = replace(resources, process_group=group, stop=lambda: group.stopping)
    number = 1 if is_small(experiment) else torch.get_num_threads()
    with threads(number):
        if path is None:
            return _train(experiment, None, storage, on_round, resources)
        if group is not None and not group.ranks.is_first:
            return follow(experiment, path, resources, group)
        with nullcontext() if ranks is None else Leader(ranks) as leader:
            outcome = _stored(experiment, path, storage, on_round)
            if outcome is None:
                with RunFolder.of(path, experiment, storage.restart) as held:
                    if storage.reopen:
                        held.reopen()
                    # another process may have finished the run in the meantime
                    outcome = _stored(experiment, path, storage, on_round)
                    if outcome is None:
                        outcome = _train(experiment, held, storage, on_round, resources, leader)
            return outcome if leader is None else leader.finish(outcome)


def is_small(experiment: Experiment) -> bool:
    """Return whether splitting an operation over threads costs more than it saves."""
    objective = experiment.resolved.problem.objective
    return objective.initial(experiment.seed)[0].numel() < SMALL_MODEL


def stored_outcome(experiment: Experiment, folder: Path) -> Outcome | None:
    """Return the outcome of a run that is over; None where there is something left to do.

    That of a trial of the same name counts, unless it was pruned. Refuses a run of the same name
    but of other content.
    """
    for path in (folder, folder.parent / TRIALS / folder.name):
        if not (path / RESULT).exists() or not is_run(path):
            continue
        check_same(read_spec(path), experiment.spec, path)
        warn_of_version(path)
        check_content(path, fingerprint_of(experiment))
        outcome = load_run(path).outcome()
        if path == folder or outcome.status != PRUNED:
            return outcome
    return None


def _stored(
    experiment: Experiment, path: Path, storage: Storage, on_round: OnRound
) -> Outcome | None:
    """Return the outcome of a run that is over, unless it is to be restarted or reopened."""
    outcome = None if storage.restart else stored_outcome(experiment, path)
    if outcome is None or (storage.reopen and outcome.diverged_at is not None):
        return None
    storage.on_open(outcome.folder or path, len(outcome.rows), True)
    for row in outcome.rows:
        on_round(experiment, row)
    return outcome


def _train(
    experiment: Experiment,
    held: RunFolder | None,
    storage: Storage,
    on_round: OnRound,
    resources: Resources,
    leader: Leader | None = None,
) -> Outcome:
    """Train from the last checkpoint to the end; a row is stored before anyone is notified of it.

    Args:
        experiment: what to train.
        held: its folder, locked; None stores nothing.
        storage: notified when the run begins.
        on_round: called with every row.
        resources: what the run uses and who watches it.
        leader: sends the state to the other ranks, where there are any.
    """
    path = None if held is None else held.path
    if not storage.weights:
        resources = replace(resources, checkpoint_every=math.inf)
    number = torch.get_num_threads()
    if held is not None and resources.process_group is None:  # ranks share a machine's cores
        number = held.threads()
    exact = experiment.resolved
    most = exact.cohort_rule.most(exact.problem.train.clients, exact.length)
    store = resources.client_store
    if not isinstance(store, ClientStore):
        store = ClientStore(store, path / SLOTS if path and storage.weights else None, most)
    with ExitStack() as stack:
        stack.enter_context(threads(number))
        journal = stack.enter_context(closing(_journal(exact, held, resources, store)))
        left = not experiment.is_over(journal.rows)
        within = replace(resources, client_store=store)
        records = experiment.records(journal.state, within) if left else nothing()
        if held is not None and journal.resumed_from:
            held.note_resumed(journal.resumed_from)
        if path is not None:
            storage.on_open(path, journal.resumed_from, False)
        loggers = [GuardedLogger.of(logger) for logger in resources.loggers]
        for logger in loggers:
            logger.begin(experiment.spec, journal.resumed_from)
        if leader is not None:
            leader.opened(journal.state, journal.rows)
        result: dict[str, Any] | None = None
        diverged: DivergedError | None = None
        record: Record | None = None
        try:
            for row in list(journal.rows):
                on_round(experiment, row)
            try:
                for record in stack.enter_context(closing(records)):
                    if held is not None and record.round == journal.resumed_from + 1:
                        held.note_engine(record)
                    row = record.to_json()
                    journal.add(row, record.state)
                    on_round(experiment, row)
                    for logger in loggers:
                        logger.on_round(row)
                    if not experiment.is_over(journal.rows) and resources.stop():
                        journal.checkpoint()
                        if resources.is_pruned():
                            journal.conclude(PRUNED, None)
                        raise RunInterrupted(path, record.round)
            except DivergedError as error:
                diverged = error
            reached = bool(journal.rows) and experiment.reached(journal.rows[-1])
            status = "diverged" if diverged else "target" if reached else "finished"
            model = None
            if held is not None and record is not None:
                held.note_engine(record)  # a CUDA graph may have been given up
            if held is not None and storage.weights and not diverged and journal.state is not None:
                model = model_bytes(experiment, journal.state)
            result = journal.conclude(status, model, diverged)
        finally:
            for logger in loggers:
                logger.end(result)
    return Outcome.of(
        experiment.spec,
        journal.rows,
        result,
        folder=path,
        stored=journal.resumed_from,
        state=journal.state if held is None else None,
    )


def _journal(
    exact: Experiment, held: RunFolder | None, resources: Resources, store: ClientStore
) -> Journal:
    """Open the journal, with restored client state where the run stores it."""
    group, clients = resources.process_group, exact.problem.train.clients

    def load(state: SimulationState) -> SimulationState:
        initial = exact.setup.init_client_state(state.params)
        processes = 1 if group is None else group.local_world_size
        return replace(state, clients=store.store(state.clients, initial, clients, processes))

    with nullcontext() if held is None else disk_errors(held.path):
        return Journal(held, resources.checkpoint_every, exact.train_device, load)


def model_bytes(experiment: Experiment, state: SimulationState) -> bytes:
    """Return the output model as a safetensors file.

    It holds the `state_dict` of a module, or `params` for an objective without one; and buffers
    that are in no `state_dict`, unless they are those that the model is built with.
    """
    params, buffers = state.output()
    named: dict[str, Tensor] = {"params": params}
    objective = experiment.resolved.problem.objective
    if isinstance(objective, LoadableObjective):
        on_host = Buffers(*(each.cpu() for each in buffers))
        module = objective.load(params.cpu(), on_host)
        named = module.state_dict()
        built = {}
        if isinstance(objective, ModuleObjective) and experiment.start is None:
            built = dict(objective.initial_module(experiment.seed).named_buffers())
        for name, value in module.named_buffers():
            same = name in built and torch.equal(value.cpu(), built[name].cpu())
            if name not in named and not same:
                named[name] = value
    return to_bytes(named)


def nothing() -> Generator[Record, None, None]:
    """Yield no record."""
    yield from ()


NOT_COPIED = (RESULT, MODEL, LOCK, SPEC)


def extend_run(folder: Path, rounds: int) -> Path:
    """Return the folder of a run with more rounds, which continues where this one ended.

    The stored rows and the last checkpoint are copied; the run itself is left as it is. The rounds
    are those of a run of so many rounds from the beginning, except that the last round of this one
    is evaluated.

    Args:
        folder: a run, finished or not.
        rounds: rounds in total.
    """
    spec = without_id(read_spec(folder))
    require(
        spec["engine"] != "flower",
        f"{folder} was run on Flower; start its app again, with more num_rounds",
    )
    before = spec["rounds"]
    require(rounds > before, f"{folder} has {before} rounds; give --rounds a larger number")
    require(
        "stop_at" not in spec, f"{folder} stops at {spec.get('stop_at')}; run it without --stop-at"
    )
    named = folder.name == id_of(spec)
    spec["rounds"] = rounds
    longer = folder.with_name(id_of(spec) if named else f"{folder.name}-{rounds}-rounds")
    if is_run(longer):
        return longer
    experiment = Experiment.of(spec)
    schedules = experiment.setup.schedules_over_rounds()
    require(
        not schedules,
        f"{' and '.join(schedules)} depends on the number of rounds, so that a longer run has "
        "other step sizes from the first; start a new one",
    )
    privacy = experiment.privacy
    require(
        not isinstance(privacy, CentralPrivacy) or privacy.epsilon is None,
        f"the noise of {folder} was computed for epsilon over {before} rounds, so that a longer "
        "run has more noise from the first; start a new one",
    )
    state = experiment.setup.init_client_state(torch.zeros(1))
    require(
        not state or not (folder / RESULT).exists(),
        f"{folder} is finished, and the client state of {spec['algorithm']} is removed then; start "
        f"a new run with --rounds {rounds}",
    )
    try:
        check_content(folder, fingerprint_of(experiment))
    except ReasonError as error:
        raise UsageError(f"{error.reason}; start a new run with --rounds {rounds}") from None
    partial_copy = folder.with_name(f".{longer.name}.tmp")
    with disk_errors(longer):
        shutil.rmtree(partial_copy, ignore_errors=True)
        shutil.copytree(folder, partial_copy, ignore=lambda _, names: set(names) & set(NOT_COPIED))
        write_bytes(partial_copy / SPEC, spec_text(spec).encode())
        os.rename(partial_copy, longer)
    return longer


class StopRequest:
    """A `stop` argument of `execute`: whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a process that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second one interrupts at once."""
        if number == signal.SIGTERM and launched():
            # from torchrun, perhaps because another rank has ended, perhaps for the second time
            self.signal = self.signal or number
            return
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        print(f"fedexp: stopping after this round{again}", file=sys.stderr, flush=True)


@contextmanager
def stop_request(listen: bool = True) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM in this block; only the main thread can."""
    request = StopRequest()
    if not listen or threading.current_thread() is not threading.main_thread():
        yield request
        return
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.receive) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this many threads; restore the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
