"""`execute`: run or resume a spec, or return its stored result.

All runs take the same path. The spec is resolved; a finished run is returned from its folder, any
other one trains from its last checkpoint (`_train`): one call of `simulate`, whose records go to
the `Journal`, to the caller and to the loggers, in this order. Threads and torch's deterministic
mode, which decide the last bits of a sum, are set for the time of the run. Ctrl-C and SIGTERM
finish the round first (`stop_request`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedexp.distributed import DistributedGroup, Ranks, launched
from fedexp.engine import Record, SimulationState
from fedexp.engine.client_store import ClientStore, Location
from fedexp.engine.plan import CohortRule
from fedexp.errors import DivergedError, UsageError, require
from fedexp.objective import Buffers, LoadableObjective, ModuleObjective
from fedexp.privacy.settings import CentralPrivacy
from fedexp.runs.checkpoint import SLOTS, to_bytes
from fedexp.runs.distributed_run import Leader, follow, join_ranks
from fedexp.runs.files import disk_errors, write_bytes
from fedexp.runs.folder import LOCK, MODEL, RESULT, RunFolder, check_content, warn_of_version
from fedexp.runs.journal import CHECKPOINT_EVERY, Journal, RunInterrupted
from fedexp.runs.loggers import GuardedLogger, Logger
from fedexp.runs.read import load_run
from fedexp.runs.spec import (
    SPEC,
    OnRound,
    Outcome,
    Run,
    Spec,
    check_same,
    folder_of,
    id_of,
    is_run,
    read_spec,
    spec_from,
    spec_text,
)

if TYPE_CHECKING:
    from fedexp.engine.programs import SharedPrograms

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class RunOptions:
    """How a run is stored and observed; does not affect results.

    Args:
        checkpoint_every: seconds between checkpoints; 0 for one per round.
        restart: discard what the folder holds of this run, and start over.
        reopen: continue a run that ended as diverged from its last checkpoint.
        stop: called after every round; the run stops there if it returns True.
        loggers: notified of the beginning, of every new round and of the end.
        client_store: where client state is stored: "memory", "disk", or "auto" for what fits.
        process_group: the ranks that share the run; None for a single process.
        programs: what the run shares with others of this process.
        on_open: called once with the folder, the number of rounds it holds, and whether the run is
            over.
    """

    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    reopen: bool = False
    stop: Callable[[], bool] = lambda: False
    loggers: Sequence[Logger] = ()
    client_store: Location = "auto"
    process_group: DistributedGroup | None = None
    programs: SharedPrograms | None = None
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None


def execute(
    spec: Spec,
    root: Path | None,
    on_round: OnRound,
    *,
    run: Run | None = None,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Outcome:
    """Run a spec to its end, or to where it diverges or reaches `stop_at`.

    A finished run is returned at once; an interrupted one resumes from its last checkpoint and ends
    with the rows and the model of one that was never interrupted. `RunInterrupted` is raised where
    `stop` returned True.

    Args:
        spec: what to run.
        root: the folder of all runs, in which the run's id names its own; None stores nothing.
        on_round: called with every row in order; rows that are stored already come first.
        run: the spec prepared, where it has been before.
        folder: the run's own folder, instead of one in `root`.
        ranks: the processes that share the work; all of them call this. The first one alone
            accesses the folder, and `on_round` is guaranteed to be called on the first alone.
        options: see `RunOptions`.
    """
    run = run or spec.prepare()
    how = RunOptions(**options)
    path = folder or (folder_of(run, root) if root is not None else None)
    if ranks is not None:  # a request to stop is reduced with the sums: all stop after one round
        group = join_ranks(run, ranks, how.stop)
        how = replace(how, process_group=group, stop=lambda: group.stopping)
    number = 1 if run.is_small else torch.get_num_threads()
    with deterministic(spec.deterministic), threads(number):
        if path is None:
            return _train(run, None, on_round, how)
        if how.process_group is not None and not how.process_group.ranks.is_first:
            return follow(run, path, how.client_store, how.process_group)
        with nullcontext() if ranks is None else Leader(ranks) as leader:
            if how.restart and folder is not None:
                require(
                    is_run(path),
                    f"{path} holds no run; leave --restart out (restart=False in Python) to begin",
                )
            outcome = _stored(run, path, on_round, how)
            if outcome is None:
                with RunFolder.of(path, run, how.restart) as held:
                    if how.reopen:
                        held.reopen()
                    # another process may have finished the run in the meantime
                    outcome = _stored(run, path, on_round, how)
                    if outcome is None:
                        outcome = _train(run, held, on_round, how, leader)
            return outcome if leader is None else leader.finish(outcome)


def stored_outcome(run: Run, folder: Path) -> Outcome | None:
    """Return the outcome of a run that is over; None where there is something left to do.

    Refuses a run of the same name but of other content.
    """
    if not (folder / RESULT).exists() or not is_run(folder):
        return None
    check_same(read_spec(folder), run.frozen, folder)
    warn_of_version(folder)
    check_content(folder, run.fingerprint)
    return replace(load_run(folder).outcome(), spec=run.spec)


def _stored(run: Run, path: Path, on_round: OnRound, how: RunOptions) -> Outcome | None:
    """Return the outcome of a run that is over, unless it is to be restarted or reopened."""
    found = None if how.restart else stored_outcome(run, path)
    if found is None or (how.reopen and found.diverged_at is not None):
        return None
    how.on_open(path, len(found.rows), True)
    for row in found.rows:
        on_round(run.spec, row)
    return found


def _train(
    run: Run,
    held: RunFolder | None,
    on_round: OnRound,
    how: RunOptions,
    leader: Leader | None = None,
) -> Outcome:
    """Train from the last checkpoint to the end; a row is stored before anyone is notified of it.

    Args:
        run: what to train.
        held: its folder, locked; None stores nothing.
        on_round: called with every row.
        how: how the run is stored and observed.
        leader: sends the state to the other ranks, where there are any.
    """
    path = None if held is None else held.path
    number = torch.get_num_threads()
    if held is not None and how.process_group is None:  # ranks share the cores of a machine
        number = held.threads()
    clients = run.task.train.clients
    most = CohortRule.of(run.cohort, clients).most(clients, run.rounds)
    store = ClientStore(how.client_store, None if path is None else path / SLOTS, most)
    with threads(number), closing(_journal(run, held, how, store)) as journal:
        left = not run.is_over(journal.rows)
        settings = (journal.state, store, how.process_group, how.programs)
        records = run.records(*settings) if left else iter(())
        if held is not None and journal.resumed_from:
            held.note_resumed(journal.resumed_from)
        if path is not None:
            how.on_open(path, journal.resumed_from, False)
        loggers = [GuardedLogger.of(logger) for logger in how.loggers]
        for logger in loggers:
            logger.begin(run.frozen, journal.resumed_from)
        if leader is not None:
            leader.opened(journal.state, journal.rows)
        result: dict[str, Any] | None = None
        diverged: DivergedError | None = None
        record: Record | None = None
        try:
            for row in list(journal.rows):
                on_round(run.spec, row)
            try:
                for record in records:
                    if held is not None and record.round == journal.resumed_from + 1:
                        held.note_engine(record)
                    row = record.to_json()
                    journal.add(row, record.state)
                    on_round(run.spec, row)
                    for logger in loggers:
                        logger.on_round(row)
                    if run.reached(row):
                        break
                    if how.stop() and record.round < run.rounds:
                        journal.checkpoint()
                        raise RunInterrupted(path, record.round)
            except DivergedError as error:
                diverged = error
            reached = bool(journal.rows) and run.reached(journal.rows[-1])
            status = "diverged" if diverged else "target" if reached else "finished"
            model = None
            if held is not None and record is not None:
                held.note_engine(record)  # a CUDA graph may have been given up
            if held is not None and diverged is None and journal.state is not None:
                model = model_bytes(run, journal.state)
            result = journal.conclude(status, model, diverged)
        finally:
            for logger in loggers:
                logger.end(result)
    return Outcome(
        run.spec,
        journal.rows,
        result["seconds"],
        result["diverged_at"],
        result["status"],
        result.get("reason", ""),
        path,
        journal.resumed_from,
        journal.state if held is None else None,
    )


def _journal(run: Run, held: RunFolder | None, how: RunOptions, store: ClientStore) -> Journal:
    """Open the journal, with restored client state where the run stores it."""

    def load(state: SimulationState) -> SimulationState:
        initial = run.setup.algorithm.client.init_client_state(state.params)
        processes = 1 if how.process_group is None else how.process_group.local_world_size
        clients = store.store(state.clients, initial, run.task.train.clients, processes)
        return replace(state, clients=clients)

    with nullcontext() if held is None else disk_errors(held.path):
        return Journal(held, how.checkpoint_every, run.device, load)


def model_bytes(run: Run, state: SimulationState) -> bytes:
    """Return the output model as a safetensors file.

    It holds the `state_dict` of a module, or `params` for an objective without one; and buffers
    that are in no `state_dict`, unless they are those that the model is built with.
    """
    params, buffers = state.output()
    named: dict[str, Tensor] = {"params": params}
    objective = run.task.objective
    if isinstance(objective, LoadableObjective):
        on_host = Buffers(*(each.cpu() for each in buffers))
        module = objective.load(params.cpu(), on_host)
        named = module.state_dict()
        built = {}
        if isinstance(objective, ModuleObjective) and run.spec.start is None:
            built = dict(objective.initial_module(run.spec.seed).named_buffers())
        for name, value in module.named_buffers():
            same = name in built and torch.equal(value.cpu(), built[name].cpu())
            if name not in named and not same:
                named[name] = value
    return to_bytes(named)


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
    found = read_spec(folder)
    own = {name: value for name, value in found.items() if name not in ("format", "id")}
    require(own["engine"] != "flower", f"{folder} cannot be extended: it was run on Flower")
    require(
        rounds > own["rounds"],
        f"{folder} has {own['rounds']} rounds; give --rounds a larger number",
    )
    require(
        "stop_at" not in own, f"{folder} stops at {own.get('stop_at')}; run it without --stop-at"
    )
    own["rounds"] = rounds
    named = folder.name == found["id"]
    longer = folder.with_name(id_of(own) if named else f"{folder.name}-{rounds}-rounds")
    if is_run(longer):
        return longer
    run = spec_from(found).prepare()
    require(
        run.setup.local.lr_schedule == "constant" or callable(run.setup.local.lr_schedule),
        f"local.lr_schedule {run.setup.local.lr_schedule!r} depends on the number of rounds, so "
        "that a longer run has other step sizes from the first; start a new one",
    )
    privacy = run.spec.privacy
    require(
        not isinstance(privacy, CentralPrivacy) or privacy.epsilon is None,
        f"the noise of {folder} was computed for epsilon over {found['rounds']} rounds, so that a "
        "longer run has more noise from the first; start a new one",
    )
    state = run.setup.algorithm.client.init_client_state(torch.zeros(1))
    require(
        not state or not (folder / RESULT).exists(),
        f"{folder} is finished, and the client state of {own['algorithm']} is removed then; start "
        f"a new run with --rounds {rounds}",
    )
    check_content(folder, run.fingerprint, f"start a new run with --rounds {rounds}")
    partial_copy = folder.with_name(f".{longer.name}.tmp")
    with disk_errors(longer):
        shutil.rmtree(partial_copy, ignore_errors=True)
        shutil.copytree(folder, partial_copy, ignore=lambda _, names: set(names) & set(NOT_COPIED))
        write_bytes(partial_copy / SPEC, spec_text(own).encode())
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


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic operations only; restore the settings before.

    On the CPU all of them are. cuBLAS reads its variable when it is first used, so a process that
    has used the GPU before should have set CUBLAS_WORKSPACE_CONFIG=:4096:8 itself.
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
        raise UsageError(
            f"{reason}; leave --deterministic out (deterministic=False in Python), or train on "
            "the CPU"
        ) from None
    finally:
        torch.use_deterministic_algorithms(modes[0])
        cudnn.deterministic, cudnn.benchmark = modes[1:]
        if workspace is None:
            os.environ.pop(CUBLAS, None)
