"""`train`: federated training as a generator of records.

A round is local training by an engine, the sums, and the server step. Several processes may share
a run (`ProcessGroup`), and while a round computes, the examples and client states of the next one
are read ahead (`ReadAhead`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.clipping import next_medians, split_medians
from fedexp.engine.base import Engine, RoundResult, Run
from fedexp.engine.batched import Batched
from fedexp.engine.client_store import ClientStates, ClientStore, Location, shapes_of
from fedexp.engine.contract import Contract, probe
from fedexp.engine.cuda_graph import RepeatedProgram
from fedexp.engine.loop import Loop
from fedexp.engine.plan import CohortRule, Work, step_lengths
from fedexp.engine.read_ahead import ReadAhead
from fedexp.engine.select import EngineName, Selected, select_engine
from fedexp.engine.spot_check import spot_check
from fedexp.engine.state import (
    EVALUATED,
    Record,
    SimulationState,
    check_range,
    server_step,
)
from fedexp.errors import (
    DataNote,
    DivergedError,
    NonFiniteUpdateWarning,
    UsageError,
    require,
)
from fedexp.kernels.launch import load_triton
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, ModuleObjective
from fedexp.objective.hidden_state import check_repeatable
from fedexp.objective.torch_errors import named_data
from fedexp.precision import (
    Precision,
    arithmetic,
    check_precision,
    checked_device,
    default_precision,
    widest,
)
from fedexp.seeding import seeded_torch
from fedexp.tasks.task import RunProgram, Task, Weighting

if TYPE_CHECKING:  # only runs that use them import them
    from fedexp.engine.programs import SharedPrograms
    from fedexp.privacy import Privacy

CAPTURED_EVALUATION = 4_000_000  # parameters; with more, launches take less time than the kernels


class ProcessGroup:
    """The processes that share a run: a single one here, several in subclasses.

    Each of them ends a round with the same numbers.
    """

    @property
    def local_world_size(self) -> int:
        """The number of the processes on this machine."""
        return 1

    def shard(self, work: Work) -> Work:
        """Return the part of a round that this process trains."""
        return work

    def engine(self, engine: Engine) -> Run:
        """Return a function that trains this process's part and returns the sums of all parts."""
        return engine

    def evaluate(
        self, task: Task, params: Tensor, buffers: Buffers, run: RunProgram | None
    ) -> dict[str, float]:
        """Return what `task.evaluate` returns, computed by all processes together."""
        return task.evaluate(params, buffers, run)


def train(
    task: Task,
    algorithm: Algorithm,
    local: LocalTraining,
    weighting: Weighting,
    *,
    rounds: int,
    rule: CohortRule,
    seed: int,
    evaluates: Callable[[int], bool],
    engine: EngineName = "auto",
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    privacy: Privacy | None = None,
    state: SimulationState | None = None,
    start: object = None,
    client_store: Location | ClientStore = "auto",
    process_group: ProcessGroup | None = None,
    programs: SharedPrograms | None = None,
) -> Iterator[Record]:
    """Yield one record per round; arguments are checked at the call, before the first round.

    Args are those of `fedexp.experiment.Experiment`, resolved, and of its `Resources`, but for:

    Args:
        rule: which clients take part in each round.
        evaluates: returns whether a round is evaluated.
        state: the state to continue from, of the same task and algorithm; None to begin.
        start: what the initial weights of the task are from; a `Record` counts its releases.
    """
    require(
        local.is_sgd or not algorithm.client.needs_sgd,
        f"{type(algorithm.client).__name__} takes local updates for sums of gradients, which "
        "those of momentum, Adam and delta-sgd are not; use local.optimizer sgd and momentum 0 "
        "with it",
    )
    longest = local.steps_for(int(task.train.sizes.max()))
    steps = longest * (rounds if local.step_schedule_over == "run" else 1)
    if local.warmup_steps >= steps:
        text = f"local.warmup_steps={local.warmup_steps}, but no client takes more than {steps} "
        warnings.warn(text + "steps, so local.lr is not reached; lower it", DataNote, stacklevel=2)
    if str(device).startswith("cuda"):
        load_triton()
    programs = programs if process_group is None else None
    original = task
    if isinstance(task.objective, ModuleObjective):
        check_repeatable(task.objective, seed, task.train.fields, task.transform)
    task, precision = _on_device(task, device, precision, programs)
    initial = SimulationState.initial(task, algorithm, seed)
    contract = probe(algorithm, initial)
    require(
        bool(initial.params.isfinite().all()),
        "the initial model holds values that are not finite; check how it is initialised",
    )
    client_state = algorithm.init_client_state(initial.params, local)
    if isinstance(start, Record):
        initial = replace(initial, releases=start.state.releases)
    state = initial if state is None else _checked_start(state, initial, client_state, rounds)
    store = client_store if isinstance(client_store, ClientStore) else ClientStore(client_store)
    most = rule.most(task.train.clients, rounds)
    group = process_group or ProcessGroup()
    state = replace(
        state, clients=store.store(state.clients, client_state, most, group.local_world_size)
    )
    # By the first round even where a run continues, so that a resumed run has the same engine.
    chosen = rule.sample(seed, 1, task.train)
    first = Work(task, algorithm, local, weighting, seed, 1, chosen, rule, rounds)
    select = partial(select_engine, engine, first, initial, precision)
    shared = None
    if programs is not None:
        select = partial(select, programs=programs)
        shared = programs, original
    if privacy is not None:  # the trial is without: noise would hide that engines disagree
        first = _private(first, privacy, rounds, state, start)
    return _rounds(first, state, contract, rounds, evaluates, select, precision, group, shared)


def _rounds(
    work: Work,
    state: SimulationState,
    contract: Contract,
    rounds: int,
    evaluates: Callable[[int], bool],
    select: Callable[[], Selected],
    precision: Precision,
    process_group: ProcessGroup,
    shared: tuple[SharedPrograms, Task] | None,
) -> Iterator[Record]:
    """Yield the records; `shared` has the programs, and the caller's task to keep it alive."""
    warned, read_ahead = False, ReadAhead(work.task.train, process_group.shard)
    selected: Selected | None = None
    rule, train = work.cohort_rule or CohortRule(), work.task.train
    noted: set[str] = set()
    small = state.params.is_cuda and state.params.numel() <= CAPTURED_EVALUATION
    repeated = RepeatedProgram() if small else None
    for round in range(state.round + 1, rounds + 1):
        clients = rule.sample(work.seed, round, train)
        if work.privacy is not None:
            clients = work.privacy.cohort(round, clients)
        work = replace(work, round=round, cohort=clients)
        if shared is not None:
            shared[0].load(work.task)
        with arithmetic(precision):
            if selected is None:
                with seeded_torch(work.seed, "trial"), _named_data(work):
                    selected = select()
                if shared is not None:
                    work = replace(work, task=shared[0].prepared(selected.engine, work.task))
                    repeated = repeated and shared[0].evaluation(work.task, precision)
                engine = process_group.engine(selected.engine)
            if len(clients):
                read_ahead(work, state)
                if selected.make is not None:
                    spot_check(process_group.shard, work, state, precision, selected.make)
            record = replace(
                run_round(work, state, engine),
                engine_choice=selected.choice,
                bytes_up=contract.bytes_up * len(clients),
                bytes_down=contract.bytes_down * len(clients),
            )
        state = record.state
        if work.privacy is not None and record.clients:
            work.privacy.warn_of_noise(record.metrics, noted)
        if record.dropped and not warned:
            warned = True
            warnings.warn(
                f"round {round}: {record.dropped} client update(s) were not finite and were left "
                "out (further ones are only counted); lower local.lr or set local.clip_norm",
                NonFiniteUpdateWarning,
                stacklevel=2,
            )
        check_range(state)
        if evaluates(round):
            with arithmetic(precision):
                record = _evaluated(work, record, process_group, noted, repeated)
        yield record


def _private(
    work: Work, privacy: Privacy, rounds: int, state: SimulationState, start: object
) -> Work:
    """Return the work with privacy; refuse what privacy does not cover, or a budget too small."""
    from fedexp.privacy.settings import PrivacyWarning
    from fedexp.privacy.simulated import UNCOUNTED, SimulatedPrivacy

    if start is not None and not isinstance(start, Record) and not state.round:
        warnings.warn(UNCOUNTED, PrivacyWarning, stacklevel=2)
    train, rule = work.task.train, work.cohort_rule or CohortRule()
    require(
        rule.clients is None and rule.choose is None,
        "privacy is accounted for cohorts that are drawn uniformly; give a cohort by number, by "
        'fraction or "all"',
    )
    size = train.clients if rule.size is None else rule.size
    mechanism = privacy.prepare(
        clients=train.clients,
        cohort=size,
        rounds=rounds,
        algorithm=work.algorithm,
        weighting=work.weighting,
        buffers=bool(state.buffers.averaged.numel()),
    )
    simulated = SimulatedPrivacy.of(privacy, mechanism, train.clients, size, work.seed)
    simulated.require_budget(
        privacy,
        rounds,
        lambda round: rule.sample(work.seed, round, train),
        state.round,
        state.releases,
    )
    return replace(work, privacy=simulated)


def _on_device(
    task: Task,
    device: str | torch.device | None,
    precision: Precision | None,
    programs: SharedPrograms | None,
) -> tuple[Task, Precision]:
    """Return the task on the device it is trained on, and the precision of its arithmetic."""
    current = next(iter(task.train.fields.values())).device
    target = checked_device(current if device is None else device)
    if widest(target) != torch.float64:
        tensors = [*task.train.fields.values(), *(task.test or {}).values()]
        tensors.append(task.objective.initial(0)[0])
        require(
            all(tensor.dtype != torch.float64 for tensor in tensors),
            f"{target.type} has no float64; convert the data and the model to float32, or train on "
            "the CPU",
        )
    chosen = precision or default_precision(target)
    check_precision(chosen, target)
    unchanged = device is None and precision is None
    if programs is not None:
        return programs.place(task, target, None if unchanged else chosen), chosen
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
    model, expected = ([state.params, *state.buffers] for state in (start, initial))
    recent = {tuple(t.shape for t in (params, *buffers)) for params, buffers in start.recent}
    fits = (
        shapes_of(start.server) == shapes_of(initial.server)
        and shapes_of(start.broadcast) == shapes_of(initial.broadcast)
        and [(t.shape, t.dtype) for t in model] == [(t.shape, t.dtype) for t in expected]
        and recent <= {tuple(t.shape for t in expected)}
        and ClientStates.of(start.clients).shapes() <= {shapes_of(client_state)}
    )
    require(fits, "start is the state of another task or algorithm; continue with the same ones")
    require(
        start.round < rounds,
        f"start has done {start.round} rounds already; rounds counts from the very first",
    )
    return start


def run_round(work: Work, state: SimulationState, engine: Run | None = None) -> Record:
    """Run one round: local training, sums, server step. Pure in `state`; by the loop by default."""
    began = time.perf_counter()
    engine = engine or Loop()
    with _named_data(work):
        result = None
        is_plain = work.privacy is None and work.algorithm.bound is None
        is_plain = is_plain and work.algorithm.server_schedule == "constant"
        if isinstance(engine, Batched) and is_plain:
            result = engine.run_round(work, state)
        if result is None:
            result = _local_then_server(work, state, engine)
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


def _named_data(work: Work) -> AbstractContextManager[None]:
    """Return a context in which torch's errors about the data of a round name them."""

    def client() -> object:
        lengths = step_lengths(work.task.train.sizes[work.cohort], work.local)
        clients = work.cohort[(lengths == 1).any(axis=0)]
        return clients[0] if len(clients) else "?"

    return named_data({"training": work.task.train.fields, "test": work.task.test or {}}, client)


def _local_then_server(work: Work, state: SimulationState, engine: Run) -> RoundResult:
    """Return the result of a round whose sums and server step are computed one after the other."""
    params, changed = state.params, dict[int, Tensors]()
    work = _with_limits(work, state, engine)
    if len(work.cohort):
        aggregate, changed = engine(work, state)
    else:  # a secret cohort may be empty
        aggregate = Aggregate.zero(params.numel(), params.dtype, params.device)
    count, dropped = int(aggregate.count), int(aggregate.dropped)
    if work.privacy is not None:  # also without a usable update: an unchanged model reveals that
        aggregate = work.privacy.release(aggregate, work.round)
    elif not count:
        return RoundResult(state, 0, dropped, {}, {})
    totals = work.total_weight, work.server_factor
    after, metrics = server_step(work.algorithm, state, aggregate, *totals)
    if work.privacy is not None:
        after = replace(after, releases=work.privacy.after(state.releases))
        metrics |= work.privacy.metrics(after.releases, aggregate)
    return RoundResult(after, count, dropped, metrics, changed)


def _with_limits(work: Work, state: SimulationState, engine: Run) -> Work:
    """Return the work with the limits to clip to; in the first round, from its own medians."""
    algorithm, limits = work.algorithm, work.algorithm.limits(state.server)
    if work.privacy is not None:
        return replace(work, privacy=work.privacy.clipped_to(limits))
    if limits is not None and not limits.are_known and len(work.cohort):
        norms, _ = engine(replace(work, limits=limits), state)
        _, medians = split_medians(state.server)
        limits = algorithm.limits(next_medians(medians, norms))
    return replace(work, limits=limits)


def _evaluated(
    work: Work, record: Record, process_group: ProcessGroup, noted: set[str], run: RunProgram | None
) -> Record:
    """Return the record with the values of its output model; metrics in `noted` were warned of."""
    with seeded_torch(work.seed, "evaluation", work.round), _named_data(work):  # the model may draw
        values: dict[str, Any] = process_group.evaluate(work.task, *record.state.output(), run)
    if not math.isfinite(values["train_loss"]):
        raise DivergedError(record.round, f"the training loss is {values['train_loss']}")
    broken = {name: value for name, value in values.items() if not math.isfinite(value)}
    further = {name: values.pop(name) for name in list(values) if name not in EVALUATED}
    for name in record.metrics.keys() & further.keys():
        raise UsageError(
            f"step of {type(work.algorithm.server).__name__} reports {name}, which is a metric of "
            "the task; give one of them another name"
        )
    for name in broken.keys() - noted:
        noted.add(name)
        what = "not a number" if math.isnan(broken[name]) else "infinite"
        warnings.warn(f"round {record.round}: {name} is {what}; it is stored as null", DataNote, 3)
    return replace(record, **values, metrics={**record.metrics, **further})
