"""`simulate`: federated training as a generator of records.

A round is local training by an engine, the sums, and the server step. Several processes may share
a run (`ProcessGroup`), and while a round computes, the examples and client states of the next one
are read ahead (`ReadAhead`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.cohorts import Cohort
from fedexp.engine.base import Engine, RoundResult, Run, WholeRound
from fedexp.engine.client_store import ClientStates, ClientStore, Location, shapes_of
from fedexp.engine.contract import Contract, probe
from fedexp.engine.cuda_graph import RepeatedProgram
from fedexp.engine.loop import Loop
from fedexp.engine.plan import CohortRule, Work, step_lengths
from fedexp.engine.read_ahead import ReadAhead
from fedexp.engine.select import EngineName, Selected, check_engine_name, select_engine
from fedexp.engine.spot_check import spot_check
from fedexp.engine.state import (
    EVALUATED,
    Record,
    SimulationState,
    check_range,
    server_step,
)
from fedexp.engine.warm_start import starting_from
from fedexp.errors import (
    DataNote,
    DivergedError,
    NonFiniteUpdateWarning,
    UsageError,
    require,
    whole_number,
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
    from fedexp.privacy import CentralPrivacy, LocalPrivacy

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


def simulate(
    task: Task,
    algorithm: Algorithm | str,
    rounds: int | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    *,
    local: LocalTraining | None = None,
    weighting: Weighting | None = None,
    evaluate_every: int | None = None,
    engine: EngineName = "auto",
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    start: SimulationState | Record | nn.Module | Mapping[str, Tensor] | None = None,
    client_store: Location | ClientStore = "auto",
    process_group: ProcessGroup | None = None,
    privacy: CentralPrivacy | LocalPrivacy | None = None,
    programs: SharedPrograms | None = None,
) -> Iterator[Record]:
    """Train, and yield one `Record` per round. Stop when you like: the consumer is in charge.

    Arguments are checked at the call, before the first round.

    Args:
        task: the problem and its data.
        algorithm: e.g. `fedexp()`, which is taken as it is; or a name, e.g. "fedexp", which
            takes the values that are tuned for the task, as the command line does.
        rounds: rounds in all, counted from the very first; the task's own number when None.
        cohort: clients per round: a number or a fraction of all, drawn without replacement; "all";
            a list of clients for every round; or a pure function `choose(rng, round, federation)`
            that returns the clients of a round, whose numpy generator depends on the seed and the
            round alone. The task's own when None.
        seed: fixes the initial weights, the cohorts and the batches.
        local: local training; the task's own when None.
        weighting: "uniform" as in the paper, or "size" to weigh clients by their examples. Uniform
            when None, unless a name has another one among the task's tuned values.
        evaluate_every: evaluate in every so many rounds, and in the last; the task's own when None.
        engine: "loop" trains one client after another, "threads" as many as there are cores,
            "batched" all at once; "dense" (plain dense networks on a CPU) and "quadratic" (least
            squares) are faster for what they suit. "auto" takes the fastest of them that agrees
            with the loop on this model. They agree up to rounding; for the same bits, name one.
            With dropout they agree in distribution: each draws other masks, and in the batched
            engine a client's masks depend on the cohort. In a few rounds, which follow from the
            seed, one client is trained again by the loop, without dropout, and `EngineError` is
            raised before the round if the engine's update differs. Not covered: operations across
            the examples of a batch that act on none of the batches that were compared.
        device: where to train, "cpu", "cuda" or "mps" (by the loop, all in float32); all data are
            copied there, if they fit. By default where they are.
        precision: "float32", "tf32" or "bf16" inside the model; by default tf32 on a GPU.
        start: a state (`record.state`) to continue from, of the same task and algorithm. A record,
            a module or a state_dict is a warm start instead: round 0 and fresh states of server and
            clients, from these weights; of a record those of its output model.
        client_store: where client state (SCAFFOLD's) is stored: "memory", "disk", or "auto" for a
            file if it could exceed a quarter of the memory. Does not affect results.
        process_group: the processes that share the run, e.g. `fedexp.distributed.DistributedGroup`.
        privacy: clip and noise updates as on Flower, and report ε in `record.metrics`
            (docs/privacy.md). The noise follows from the seed: it shows what a private deployment
            would reach, and protects nobody.
        programs: what this run shares with others of this process, see
            `fedexp.engine.programs.SharedPrograms`; does not affect results. Not used by several
            processes that share a run.

    A record holds its state, so a list of all records holds all models in memory.

    >>> from fedexp.algorithms import fedexp
    >>> from fedexp.tasks import toy
    >>> [round(r.server_lr, 6) for r in simulate(toy(), fedexp(eps=0, factor=1), rounds=4)]
    [1.2, 6.0, 1.2, 6.0]
    """
    _check_kinds(task, algorithm, local)
    if isinstance(algorithm, str):
        from fedexp.options import build_algorithm, paper_setup

        named = paper_setup(task, build_algorithm(algorithm))
        algorithm, local = named.algorithm, local or named.local
        weighting = weighting or named.weighting
    rounds = whole_number("rounds", task.rounds if rounds is None else rounds, 1)
    every = whole_number(
        "evaluate_every", task.evaluate_every if evaluate_every is None else evaluate_every, 1
    )
    seed, local = whole_number("seed", seed, 0), local or task.local
    weighting = weighting or "uniform"
    require(weighting in ("uniform", "size"), f"weighting is uniform or size, not {weighting!r}")
    require(
        local.is_sgd or not algorithm.client.needs_sgd,
        f"{type(algorithm.client).__name__} takes local updates for sums of gradients, which "
        "those of momentum, Adam and delta-sgd are not; use local.optimizer sgd and momentum 0 "
        "with it",
    )
    rule = CohortRule.of(task.cohort if cohort is None else cohort, task.train.clients)
    if str(device).startswith("cuda"):
        load_triton()
    programs = programs if process_group is None else None
    given = task
    if isinstance(task.objective, ModuleObjective):
        check_repeatable(task.objective, seed, task.train.fields, task.transform)
    task, precision = _on_device(task, device, precision, programs)
    if start is not None and not isinstance(start, SimulationState):
        task, start = starting_from(task, start, seed), None
    initial = SimulationState.initial(task, algorithm, seed)
    contract = probe(algorithm, initial)
    require(
        bool(initial.params.isfinite().all()),
        "the initial model holds values that are not finite; check how it is initialised",
    )
    client_state = contract.client_state
    state = initial if start is None else _checked_start(start, initial, client_state, rounds)
    store = client_store if isinstance(client_store, ClientStore) else ClientStore(client_store)
    most = rule.most(task.train.clients, rounds)
    group = process_group or ProcessGroup()
    state = replace(
        state, clients=store.store(state.clients, client_state, most, group.local_world_size)
    )
    engine = check_engine_name(engine)
    # By the first round even where a run continues, so that a resumed run has the same engine.
    chosen = rule.sample(seed, 1, task.train)
    first = Work(task, algorithm, local, weighting, seed, 1, chosen, rule, rounds)
    select = partial(select_engine, engine, first, initial, precision)
    shared = None
    if programs is not None:
        select = partial(select, programs=programs)
        shared = programs, given
    if privacy is not None:  # the trial is without: noise would hide that engines disagree
        first = _private(first, privacy, rounds, initial)
    return _rounds(first, state, contract, rounds, every, select, precision, group, shared)


def _rounds(
    work: Work,
    state: SimulationState,
    contract: Contract,
    rounds: int,
    evaluate_every: int,
    select: Callable[[], Selected],
    precision: Precision,
    process_group: ProcessGroup,
    shared: tuple[SharedPrograms, Task] | None,
) -> Iterator[Record]:
    """Yield the records; `shared` has the programs with the task as it was given, to hold it."""
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
        if record.dropped and not warned:
            warned = True
            _warn_dropped(record)
        check_range(state)
        if round % evaluate_every == 0 or round == rounds:
            with arithmetic(precision):
                record = _evaluated(work, record, process_group, noted, repeated)
        yield record


def _check_kinds(task: Any, algorithm: Any, local: Any) -> None:
    """Raise `UsageError` for a name, a class or a function in the place of what it stands for."""
    if isinstance(task, str):
        raise UsageError(
            f"simulate takes a Task, not the name {task!r}; call its function, fx.tasks.digits()"
        )
    if isinstance(task, type | FunctionType):
        example = "digits" if isinstance(task, type) else task.__name__
        raise UsageError(
            f"{task.__name__} is no Task until it is called; pass fx.tasks.{example}()"
        )
    require(isinstance(task, Task), f"simulate takes a Task, not {type(task).__name__}")
    if isinstance(algorithm, type | FunctionType):
        example = "fedexp" if isinstance(algorithm, type) else algorithm.__name__
        raise UsageError(
            f"{algorithm.__name__} is no Algorithm until it is called; pass fx.{example}()"
        )
    require(
        isinstance(algorithm, Algorithm | str),
        f"simulate takes an Algorithm, not {type(algorithm).__name__}; a rule of your own is "
        'fx.Algorithm("name", client=..., server=...)',
    )
    require(
        local is None or isinstance(local, LocalTraining),
        f"local is a LocalTraining, not {type(local).__name__}; pass fx.LocalTraining(lr=0.1)",
    )


def _private(
    work: Work,
    privacy: CentralPrivacy | LocalPrivacy,
    rounds: int,
    initial: SimulationState,
) -> Work:
    """Return the work with privacy; refuse what privacy does not cover, or a budget too small."""
    from fedexp.privacy import CentralPrivacy, LocalPrivacy
    from fedexp.privacy.simulated import SimulatedPrivacy

    require(
        isinstance(privacy, CentralPrivacy | LocalPrivacy),
        f"privacy is a CentralPrivacy or a LocalPrivacy of fedexp.privacy, not {privacy!r}",
    )
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
        buffers=bool(initial.buffers.averaged.numel()),
    )
    found = SimulatedPrivacy.of(privacy, mechanism, train.clients, size, work.seed)
    found.require_budget(privacy, rounds, lambda round: rule.sample(work.seed, round, train))
    return replace(work, privacy=found)


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
            all(each.dtype != torch.float64 for each in tensors),
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
    with _named_data(work):
        result = None
        if isinstance(engine, WholeRound) and work.privacy is None:
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
    if len(work.cohort):
        aggregate, changed = engine(work, state)
    else:  # a secret cohort may be empty
        aggregate = Aggregate.zero(params.numel(), params.dtype, params.device)
    count, dropped = int(aggregate.count), int(aggregate.dropped)
    if work.privacy is not None:  # also without a usable update: an unchanged model reveals that
        aggregate = work.privacy.release(aggregate, work.round)
    elif not count:
        return RoundResult(state, 0, dropped, {}, {})
    after, metrics = server_step(work.algorithm, state, aggregate, work.total_weight)
    if work.privacy is not None:
        metrics |= work.privacy.metrics(work.round, aggregate)
    return RoundResult(after, count, dropped, metrics, changed)


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


def _warn_dropped(record: Record) -> None:
    warnings.warn(
        f"round {record.round}: {record.dropped} client update(s) were not finite and were left "
        "out (further ones are only counted); lower local.lr or set local.clip_norm",
        NonFiniteUpdateWarning,
        stacklevel=3,
    )
