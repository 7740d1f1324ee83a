"""`simulate`: federated training as a generator of records.

A round is local training by an engine, the sums, and the server step. Several processes may share
a run (`ProcessGroup`), and while a round computes, the examples and client states of the next one
are read ahead (`ReadAhead`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.data.federation import Federation
from fedexp.data.streaming import prefetch_pages
from fedexp.engine.batched import Batched
from fedexp.engine.client_store import ClientStates, ClientStore, Location, StoredStates, shapes_of
from fedexp.engine.cuda_graph import RoundResult
from fedexp.engine.loop import Engine, Loop, Run
from fedexp.engine.plan import Work, sample_cohort, step_lengths
from fedexp.engine.select import EngineName, Selected, check_engine_name, select_engine
from fedexp.engine.state import EVALUATED, Record, SimulationState, check_range, server_step
from fedexp.errors import (
    DataNote,
    DivergedError,
    NonFiniteUpdateWarning,
    UsageError,
    renamed_arguments,
    require,
)
from fedexp.local import LocalTraining
from fedexp.objective import Buffers
from fedexp.precision import Precision, arithmetic, check_precision, default_precision
from fedexp.seeding import seeded_torch
from fedexp.tasks.task import Task, Weighting

LEAST_BYTES = 2**26  # of examples to read ahead; less is in memory anyway


class ProcessGroup(Protocol):
    """The processes that share a run. Each of them ends a round with the same numbers.

    Attributes:
        local_world_size: how many of the processes are on this machine.
    """

    @property
    def local_world_size(self) -> int: ...

    def shard(self, work: Work) -> Work:
        """Return the part of a round that this process trains."""
        ...

    def engine(self, engine: Engine) -> Run:
        """Return a function that trains this process's part and returns the sums of all parts."""
        ...

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        """Return what `task.evaluate` returns, computed by all processes together."""
        ...


class SingleProcess:
    """A run in one process."""

    local_world_size = 1

    def shard(self, work: Work) -> Work:
        return work

    def engine(self, engine: Engine) -> Run:
        return engine

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        return task.evaluate(params, buffers)


@renamed_arguments(keep_clients="client_store", sharing="process_group")
def simulate(
    task: Task,
    algorithm: Algorithm,
    rounds: int | None = None,
    cohort: int | None = None,
    seed: int = 0,
    *,
    local: LocalTraining | None = None,
    weighting: Weighting = "uniform",
    evaluate_every: int | None = None,
    engine: EngineName = "auto",
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    start: SimulationState | None = None,
    client_store: Location | ClientStore = "auto",
    process_group: ProcessGroup | None = None,
) -> Iterator[Record]:
    """Train, and yield one `Record` per round. Stop when you like: the consumer is in charge.

    Arguments are checked at the call, before the first round.

    Args:
        task: the problem and its data.
        algorithm: e.g. `fedexp(eps=1e-3)`.
        rounds: rounds in all, counted from the very first; the task's own number when None.
        cohort: clients per round, drawn without replacement; None for all.
        seed: fixes the initial weights, the cohorts and the batches.
        local: local training; the task's own when None.
        weighting: "uniform" as in the paper, or "size" to weigh clients by their examples.
        evaluate_every: evaluate in every so many rounds, and in the last; the task's own when None.
        engine: "loop" trains one client after another, "threads" as many as there are cores,
            "batched" all at once; "dense" (plain dense networks on a CPU) and "quadratic" (least
            squares) are faster for what they suit. "auto" takes the fastest of them that agrees
            with the loop on this model. They agree up to rounding; for the same bits, name one.
        device: where to train, e.g. "cuda"; all data are copied there, if they fit. By default
            where they are.
        precision: "float32", "tf32" or "bf16" inside the model; by default tf32 on a GPU.
        start: continue from the state of an earlier record, of the same task and algorithm.
        client_store: where client state (SCAFFOLD's) is stored: "memory", "disk", or "auto" for a
            file if it could exceed a quarter of the memory. Does not affect results.
        process_group: the processes that share the run, e.g. `fedexp.distributed.DistributedGroup`.

    A record holds its state, so a list of all records holds all models in memory.

    >>> from fedexp.algorithms import fedexp
    >>> from fedexp.tasks import toy
    >>> [round(r.server_lr, 6) for r in simulate(toy(), fedexp(eps=0, factor=1), rounds=4)]
    [1.2, 6.0, 1.2, 6.0]
    """
    rounds = task.rounds if rounds is None else rounds
    for name, value in {"rounds": rounds, "cohort": cohort, "seed": seed}.items():
        require(value is None or isinstance(value, int), f"{name} must be a whole number: {value}")
    require(rounds >= 1, f"rounds must be at least 1, not {rounds}")
    evaluate_every = task.evaluate_every if evaluate_every is None else evaluate_every
    require(evaluate_every >= 1, f"evaluate_every must be at least 1, not {evaluate_every}")
    require(weighting in ("uniform", "size"), f"weighting is uniform or size, not {weighting!r}")
    require(seed >= 0, f"the seed must not be negative, but is {seed}")
    sample_cohort(seed, 0, task.train.clients, cohort)
    task, precision = _on_device(task, device, precision)
    initial = SimulationState.initial(task, algorithm, seed)
    client_state = algorithm.client.init_client_state(initial.params)
    state = initial if start is None else _checked_start(start, initial, client_state, rounds)
    store = client_store if isinstance(client_store, ClientStore) else ClientStore(client_store)
    most = min(task.train.clients, rounds * (cohort or task.train.clients))
    group = process_group or SingleProcess()
    client_state = algorithm.client.init_client_state(state.params)
    state = replace(
        state, clients=store.store(state.clients, client_state, most, group.local_world_size)
    )
    work = Work(
        task, algorithm, local or task.local, weighting, seed, 0, sample_cohort(0, 0, 1, None)
    )
    engine = check_engine_name(engine)
    first = replace(work, round=1, cohort=sample_cohort(seed, 1, task.train.clients, cohort))
    # By the first round even where a run continues, so that a resumed run has the same engine.
    select = partial(select_engine, engine, first, initial, precision)
    return _rounds(work, state, rounds, cohort, evaluate_every, select, precision, group)


def _rounds(
    work: Work,
    state: SimulationState,
    rounds: int,
    cohort: int | None,
    evaluate_every: int,
    select: Callable[[], Selected],
    precision: Precision,
    process_group: ProcessGroup,
) -> Iterator[Record]:
    warned, read_ahead = False, ReadAhead(work.task.train, process_group.shard)
    selected: Selected | None = None
    noted: set[str] = set()
    for round in range(state.round + 1, rounds + 1):
        clients = sample_cohort(work.seed, round, work.task.train.clients, cohort)
        work = replace(work, round=round, cohort=clients)
        with arithmetic(precision):
            if selected is None:
                with seeded_torch(work.seed, "trial"):
                    selected = select()
                engine = process_group.engine(selected.engine)
            read_ahead(work, state)
            record = replace(run_round(work, state, engine), engine_choice=selected.choice)
        state = record.state
        if record.dropped and not warned:
            warned = True
            _warn_dropped(record)
        check_range(state)
        if round % evaluate_every == 0 or round == rounds:
            with arithmetic(precision):
                record = _evaluated(work, record, process_group, noted)
        yield record


def _on_device(
    task: Task, device: str | torch.device | None, precision: Precision | None
) -> tuple[Task, Precision]:
    """Return the task on the device it is trained on, and the precision of its arithmetic."""
    current = next(iter(task.train.fields.values())).device
    try:
        target = current if device is None else torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}; use cpu or cuda") from None
    require(target.type in ("cpu", "cuda"), f"cannot train on {target.type}; use cpu or cuda")
    require(
        target.type != "cuda" or torch.cuda.is_available(),
        "there is no CUDA device here; leave device out to use the CPU",
    )
    chosen = precision or default_precision(target)
    check_precision(chosen, target)
    unchanged = device is None and precision is None
    return (task if unchanged else task.to(target, chosen)), chosen


def _checked_start(
    start: SimulationState, initial: SimulationState, client_state: Tensors, rounds: int
) -> SimulationState:
    """Return `start`; refuse a state of another model or algorithm, or one that is finished.

    Args:
        start: the state.
        initial: the state before the first round.
        client_state: the state of a client before its first round.
        rounds: of the whole run.
    """
    same = all(
        {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}
        for a, b in ((start.server, initial.server), (start.broadcast, initial.broadcast))
    )
    ours, theirs = ([s.params, *s.buffers] for s in (start, initial))
    same = same and [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    recent = {tuple(t.shape for t in (params, *buffers)) for params, buffers in start.recent}
    same = same and recent <= {tuple(t.shape for t in theirs)}
    same = same and ClientStates.of(start.clients).shapes() <= {shapes_of(client_state)}
    require(same, "start is the state of another task or algorithm; continue with the same ones")
    require(
        start.round < rounds,
        f"start has done {start.round} rounds already; rounds counts from the very first",
    )
    return start


def run_round(work: Work, state: SimulationState, engine: Run | None = None) -> Record:
    """Run one round: local training, sums, server step. Pure in `state`; by the loop by default."""
    began = time.perf_counter()
    engine = engine or Loop()
    try:
        result = engine.run_round(work, state) if isinstance(engine, Batched) else None
        if result is None:
            result = _local_then_server(work, state, engine)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise _batch_of_one(work) from error
    clients = ClientStates.of(state.clients).updated(result.changed)
    metrics = dict(result.metrics)
    return Record(
        round=work.round,
        server_lr=metrics.pop("server_lr", None),
        local_lr=work.lr,
        clients=result.clients,
        dropped=result.dropped,
        seconds=time.perf_counter() - began,
        metrics=metrics,
        state=replace(result.state, round=work.round, clients=clients),
        task=work.task,
    )


def _batch_of_one(work: Work) -> UsageError:
    """Return the error for BatchNorm that meets a batch of one example."""
    lengths = step_lengths(work.task.train.sizes[work.cohort], work.local)
    clients = work.cohort[(lengths == 1).any(axis=0)]
    return UsageError(
        f"client {clients[0] if len(clients) else '?'} has a batch of one example, which BatchNorm "
        "cannot normalise; choose a local.batch_size that leaves no single example, leave such "
        "clients out, or use GroupNorm"
    )


def _local_then_server(work: Work, state: SimulationState, engine: Run) -> RoundResult:
    """Return the result of a round whose sums and server step are computed one after the other."""
    aggregate, changed = engine(work, state)
    count, dropped = int(aggregate.count), int(aggregate.dropped)
    if not count:
        return RoundResult(state, 0, dropped, {}, {})
    after, metrics = server_step(work.algorithm, state, aggregate, work.total_weight)
    return RoundResult(after, count, dropped, metrics, changed)


def _evaluated(work: Work, record: Record, process_group: ProcessGroup, noted: set[str]) -> Record:
    """Return the record with the values of its output model; metrics in `noted` were warned of."""
    with seeded_torch(work.seed, "evaluation", work.round):  # in case the model draws
        values: dict[str, Any] = process_group.evaluate(work.task, *record.state.output())
    if not math.isfinite(values["train_loss"]):
        raise DivergedError(record.round, f"the training loss is {values['train_loss']}")
    further = {name: values.pop(name) for name in list(values) if name not in EVALUATED}
    for name in {name for name, value in further.items() if math.isnan(value)} - noted:
        noted.add(name)
        warnings.warn(
            f"round {record.round}: {name} is not a number; it is stored as null", DataNote, 3
        )
    return replace(record, **values, metrics={**record.metrics, **further})


def _warn_dropped(record: Record) -> None:
    warnings.warn(
        f"round {record.round}: {record.dropped} client update(s) were not finite and were left "
        "out (further ones are only counted); lower local.lr or set local.clip_norm",
        NonFiniteUpdateWarning,
        stacklevel=3,
    )


class ReadAhead:
    """Asks the system to read the examples and client states of the next round, in a thread.

    Args:
        train: the clients' data; small fields and those on a device are not read ahead.
        shard: returns the part of a round that this process trains.
    """

    def __init__(self, train: Federation, shard: Callable[[Work], Work]) -> None:
        self._shard = shard
        on_host = [value for value in train.fields.values() if value.device.type == "cpu"]
        self._examples = sum(value.nbytes for value in on_host) >= LEAST_BYTES
        self._thread = ThreadPoolExecutor(1)
        self._started = False

    def __call__(self, work: Work, state: SimulationState) -> None:
        """Start to read the examples and client states of the round after `work`."""
        states = state.clients if isinstance(state.clients, StoredStates) else None
        if self._examples or states is not None:
            train, work = work.task.train if self._examples else None, self._shard(work)
            if not self._started:  # the first round was not read ahead, and is needed now
                _read(train, states, work.cohort)
            self._started = True
            self._thread.submit(_read, train, states, work.after().cohort)


def _read(
    train: Federation | None, states: StoredStates | None, clients: NDArray[np.int64]
) -> None:
    if train is not None:
        prefetch_pages(train, clients)
    if states is not None:
        states.prefetch(clients)
