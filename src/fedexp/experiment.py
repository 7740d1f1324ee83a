"""`Experiment`: the one description of a run, as a frozen value. `simulate` trains one.

Task and algorithm are objects, names of the package's, or references (`study.py:task`). `resolved`
turns names, None and options into objects, once. `spec` is the same as plain values, with all that
decides the numbers: what `spec.toml` stores, and what `id` is a digest of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from fedexp import catalogue
from fedexp.algorithms import Algorithm
from fedexp.client import ClientRule
from fedexp.cohorts import Cohort
from fedexp.engine.client_store import ClientStore, Location
from fedexp.engine.plan import CohortRule
from fedexp.engine.select import EngineName, check_engine_name
from fedexp.engine.simulation import ProcessGroup, train
from fedexp.engine.state import Record, SimulationState
from fedexp.engine.warm_start import read_weights, starting_from, weights_digest
from fedexp.errors import UsageError, check_name, require, shown, whole_number
from fedexp.local import LocalTraining
from fedexp.modes import MODES, printed_eps
from fedexp.options import Setup, share_options, split_task_options
from fedexp.plain import id_of, plain, privacy_from, privacy_table
from fedexp.precision import Precision, checked_device, deterministic
from fedexp.references import (
    function_reference,
    in_session,
    is_reference,
    load_object,
)
from fedexp.server import ServerRule
from fedexp.tasks.task import Task, Weighting
from fedexp.text import option_text

if TYPE_CHECKING:
    from fedexp.engine.programs import SharedPrograms
    from fedexp.privacy.settings import Privacy

PathLike = str | os.PathLike[str]
Start = Record | nn.Module | Mapping[str, Tensor] | PathLike
Row = dict[str, Any]
MOST_ROUNDS = 10**9  # more cannot be stored in a spec
CHECKPOINT_EVERY = 10.0  # seconds
ROUNDING = 1e-9  # relative to a target


class Options(TypedDict, total=False):
    """The fields of `Experiment` that `simulate` takes by keyword alone."""

    local: LocalTraining | None
    weighting: Weighting | None
    mode: str
    options: Mapping[str, Any]
    evaluate_every: int | tuple[int, int] | None
    engine: EngineName
    device: str | None
    precision: Precision | None
    stop_at: float | None
    deterministic: bool
    privacy: Privacy | None
    by_client: bool


class Settings(Options, total=False):
    """The fields of `Experiment` beside task, algorithm and seed, as keyword arguments."""

    rounds: int | None
    cohort: Cohort | None
    start: Start | None


class Logger(Protocol):
    """Receives the rounds of a run as it trains."""

    def begin(self, spec: Mapping[str, Any], resumed_from: int) -> None:
        """Open the log; `spec` is as in spec.toml, and `resumed_from` rounds were logged before."""

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Log the row of a round."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Close the log; `result` is None where the run was interrupted and can be resumed."""


@dataclass(frozen=True)
class Resources:
    """What a run uses and who watches it; does not affect results.

    Attributes:
        client_store: where client state is stored: "memory", "disk", or "auto" for what fits.
        process_group: the processes that share the run; None for a single one.
        programs: what the run shares with others of this process; not used by several processes.
        checkpoint_every: seconds between checkpoints; 0 for one per round.
        stop: called after every round; a stored run stops there if it returns True.
        is_pruned: called there; True makes the stop an end: the run is not resumed.
        loggers: notified of the beginning, of every new round and of the end.
    """

    client_store: Location | ClientStore = "auto"
    process_group: ProcessGroup | None = None
    programs: SharedPrograms | None = None
    checkpoint_every: float = CHECKPOINT_EVERY
    stop: Callable[[], bool] = lambda: False
    is_pruned: Callable[[], bool] = lambda: False
    loggers: Sequence[Logger] = ()


class TaskKey(NamedTuple):
    """What a task is built from; equal keys have the same task.

    Attributes:
        factory: the name or the reference, the mode and the arguments that were set.
        seed: of the run, if the task depends on it; None otherwise.
    """

    factory: tuple[Any, ...]
    seed: int | None


class Names(NamedTuple):
    """What task and algorithm are called in records, and where they are if not of the package."""

    task: str
    task_source: str | None
    algorithm: str
    algorithm_source: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Experiment:
    """Everything that determines the numbers of a run. None is the task's own, everywhere.

    Args:
        task: a task, the name of one of the package, or a reference such as `study.py:task`.
        algorithm: an `Algorithm` is taken as it is; a name takes the values that are tuned for the
            task; a reference such as `study.py:mine` is an algorithm of your own, as it is.
        seed: fixes the data of a task that is named, the initial weights, the cohorts and the
            batches.
        rounds: number of rounds.
        cohort: clients per round: a number or a fraction of all, drawn without replacement; "all";
            a list of clients for every round; or a pure function `choose(rng, round, federation)`
            that returns the clients of a round, or its reference.
        local: local training, instead of the task's.
        weighting: "uniform" as in the paper, or "size" to weigh clients by their examples.
        mode: of a named algorithm: "paper" for the values tuned for the task, "authors-code" for
            what the released code does, or "recommended" for what this project advises.
        options: single options by name, as `--set` takes them: {"eps": 0.01, "local.lr": 0.1};
            `task.*` are arguments of a task that is named.
        evaluate_every: rounds between evaluations; the last round always is evaluated. A pair adds
            the last rounds: (10, 5) for every tenth and the last five.
        engine: "auto", or the name of one, see `simulate`.
        device: e.g. "cuda"; by default where the data are.
        precision: "float32", "tf32" or "bf16" inside the model; by default tf32 on a GPU.
        stop_at: value of the task's metric at which the run ends early; accuracies may be percent.
        deterministic: use deterministic torch operations only, on a GPU too.
        start: weights that training begins with: a record, a module, a state_dict, a run folder or
            a safetensors file.
        privacy: simulated differential privacy, see docs/privacy.md.
        by_client: also evaluate every client, for the worst decile.

    >>> experiment = Experiment("toy", "fedexp", rounds=4)
    >>> [round(record.server_lr, 6) for record in experiment.records()]
    [1.2, 6.0, 1.2, 6.0]
    >>> print(experiment.replace(rounds=30, options={"local.steps": 9}))
    fedexp on toy: seed 0, 30 rounds, all of 2 clients per round; local.steps=9
    """

    task: Task | str
    algorithm: Algorithm | str = "fedexp"
    seed: int = 0
    rounds: int | None = None
    cohort: Cohort | None = None
    local: LocalTraining | None = None
    weighting: Weighting | None = None
    mode: str = "paper"
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int | tuple[int, int] | None = None
    engine: EngineName = "auto"
    device: str | None = None
    precision: Precision | None = None
    stop_at: float | None = None
    deterministic: bool = False
    start: Start | None = None
    privacy: Privacy | None = None
    by_client: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without the task, and store plain values."""
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        _check_kinds(self)
        plain = {
            "seed": whole_number("seed", self.seed, 0),
            "rounds": None if self.rounds is None else whole_number("rounds", self.rounds, 1),
            "cohort": _plain_cohort(self.cohort),
            "evaluate_every": _evaluations(self.evaluate_every),
            "options": dict(self.options),
            "device": None if self.device is None else str(self.device),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        most = f"rounds must be at most {MOST_ROUNDS:,}, not {self.rounds}"
        require((self.rounds or 1) <= MOST_ROUNDS, most)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}  # without what has been computed

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in FIELDS}
        shown = [f"{n}={v!r}" for n, v in values.items() if v != DEFAULTS.get(n)]
        return f"Experiment({', '.join(shown)})"

    def __str__(self) -> str:
        spec, clients = self.spec, self.problem.train.clients
        cohort = spec.get("cohort", "all")
        size = f"{cohort} of {clients:,}" if isinstance(cohort, int | str) else str(cohort)
        changes = ", ".join(f"{n}={v}" for n, v in spec["set"].items() if n in spec["changed"])
        return (
            f"{spec['algorithm']} on {spec['task']}: seed {self.seed}, {spec['rounds']:,} rounds, "
            f"{size} clients per round{'; ' * bool(changes)}{changes}"
        )

    def replace(self, **changes: Any) -> Experiment:
        """Return a copy with other values of some fields."""
        check_names(changes)
        return replace(self, **changes)

    def with_options(self, options: Mapping[str, Any]) -> Experiment:
        """Return a copy with further options, which replace those of the same name."""
        return replace(self, options={**self.options, **options})

    def records(
        self,
        state: SimulationState | None = None,
        resources: Resources = Resources(),  # noqa: B008 (frozen)
    ) -> Generator[Record, None, None]:
        """Train, and yield one `Record` per round, up to `stop_at` where there is one.

        Arguments are checked at the call, before the first round.

        Args:
            state: `record.state` of an earlier round, to continue from it.
            resources: what the run uses; does not affect the numbers.
        """
        exact, setup = self.resolved, self.setup
        records = train(
            exact.problem,
            setup.algorithm,
            setup.local,
            setup.weighting,
            rounds=exact.length,
            rule=exact.cohort_rule,
            seed=exact.seed,
            evaluates=exact.evaluates,
            engine=exact.engine,
            device=exact.device,
            precision=exact.precision,
            privacy=exact.privacy,
            state=state,
            start=self.start,
            client_store=resources.client_store,
            process_group=resources.process_group,
            programs=resources.programs,
        )
        return exact._until_reached(records)

    def _until_reached(self, records: Iterator[Record]) -> Generator[Record, None, None]:
        with deterministic(self.deterministic):
            for record in records:
                yield record
                if self.stop_at is not None and self.reached(record.to_json()):
                    return

    @property
    def resolved(self) -> Experiment:
        """The same run with objects in the place of names, options and None.

        Builds the task; raises `UsageError` for what does not exist or does not fit.
        """
        if "_exact" not in vars(self):
            vars(self)["_exact"] = self._resolve()
        return vars(self)["_exact"] or self

    def _resolve(self) -> Experiment:
        others = split_task_options(self.options)[1]
        self._check_before_data(others)
        task = self.base_task
        setup = self._setup(task, others)
        if self.by_client and not task.by_client:
            task = replace(task, by_client=True)
        if self.start is not None:
            weights: Any = self.start
            if isinstance(weights, str | os.PathLike):
                weights = read_weights(Path(weights))
            task = starting_from(task, weights, self.seed)
        cohort = _plain_cohort(task.cohort) if self.cohort is None else self.cohort
        if isinstance(cohort, str) and cohort != "all":
            cohort = load_object(cohort)
        exact = replace(
            self,
            task=task,
            algorithm=setup.algorithm,
            rounds=task.rounds if self.rounds is None else self.rounds,
            cohort="all" if cohort is None else cohort,
            local=setup.local,
            weighting=setup.weighting,
            mode="paper",
            options={},
            evaluate_every=self.evaluate_every or task.evaluate_every,
            engine=check_engine_name(self.engine),
            stop_at=task.checked_target(self.stop_at, "stop_at"),
            start=None,
        )
        vars(exact)["_exact"] = None  # it is resolved; not itself, so that tasks are freed at once
        _ = exact.cohort_rule  # raises where it does not fit
        return exact

    @property
    def is_resolved(self) -> bool:
        """Whether the task has been built."""
        return "_exact" in vars(self)

    @property
    def problem(self) -> Task:
        """The task as an object."""
        task = self.resolved.task
        assert isinstance(task, Task)
        return task

    @property
    def cohort_rule(self) -> CohortRule:
        """Which clients take part in each round."""
        return CohortRule.of(self.resolved.cohort, self.problem.train.clients)

    @property
    def length(self) -> int:
        """The number of rounds."""
        return self.resolved.rounds or 0

    @property
    def train_device(self) -> torch.device:
        """The device that it trains on; raises `UsageError` where it is not available."""
        return checked_device(self.device or next(iter(self.problem.train.fields.values())).device)

    @property
    def setup(self) -> Setup:
        """The resolved algorithm with its local training and weighting."""
        exact: Any = self.resolved
        return Setup(exact.algorithm, exact.local, exact.weighting)

    @cached_property
    def task_key(self) -> TaskKey:
        """What the task is built from; raises `UsageError` for one that does not exist."""
        of_task, _ = split_task_options(self.options)
        if isinstance(self.task, Task):
            return TaskKey((self.task.name, id(self.task)), None)
        known = catalogue.task_arguments(self.task, of_task, self.seed, self.mode)
        seed = self.seed if "seed" in known and "seed" not in of_task else None
        texts = {name: option_text(value) for name, value in of_task.items()}
        return TaskKey((self.task, self.mode, tuple(sorted(texts.items()))), seed)

    def _check_before_data(self, options: Mapping[str, Any]) -> None:
        """Refuse an unknown name or an option of the wrong type; needs no task."""
        algorithm = self.algorithm
        if isinstance(algorithm, str):
            algorithm = catalogue.build_algorithm(algorithm)
        check_name("mode", self.mode, MODES)
        _ = self.task_key
        for name, value in options.items():
            Setup(algorithm, LocalTraining()).parse(name, value)

    def sharing(self, other: Experiment | None) -> Experiment:
        """Return a copy that has the task of another run, where both are built from the same.

        A copy, so that the task is dropped with it; a run whose task has been built is returned.
        """
        if self.is_resolved:
            return self
        copy = replace(self)
        if other is not None and other.is_resolved and other.task_key == self.task_key:
            vars(copy)["base_task"] = other.base_task
        return copy

    @cached_property
    def base_task(self) -> Task:
        """The task as it is given or built, without what other fields change of it."""
        arguments, _ = split_task_options(self.options)
        return catalogue.build_task(self.task, arguments, self.seed, self.mode)

    def _setup(self, task: Task, options: Mapping[str, Any]) -> Setup:
        """Return the algorithm with its local training, weighting and options."""
        algorithm = self.algorithm
        as_it_is = isinstance(algorithm, Algorithm) or is_reference(algorithm)
        named = self._named_setup(task)
        if isinstance(algorithm, Algorithm):
            named = Setup(algorithm, task.local)
        setup = replace(
            named, local=self.local or named.local, weighting=self.weighting or named.weighting
        )
        # an eps has the unit of an algorithm that is taken as it is, or that of the mode
        if self.mode == "paper" and not as_it_is:
            options = printed_eps(setup, options)
        return setup.with_options(options)

    def _named_setup(self, task: Task) -> Setup:
        """Return what the algorithm's name alone means: for the task, in the mode."""
        name, source = self.names.algorithm, self.names.algorithm_source
        if source is not None:
            return Setup(catalogue.build_algorithm(source), task.local)
        return MODES[self.mode](task, catalogue.build_algorithm(name))

    @cached_property
    def names(self) -> Names:
        """Names of task and algorithm, with references to objects of the user's."""
        return Names(*catalogue.named_task(self.task), *catalogue.named_algorithm(self.algorithm))

    @cached_property
    def portable(self) -> Experiment:
        """The same run with references in the place of the user's objects, for other processes."""
        local, options, names = self.local, dict(self.options), self.names
        if local is not None and any(map(callable, vars(local).values())):
            options, local = {f"local.{n}": v for n, v in vars(local).items()} | options, None
        registered = isinstance(self.algorithm, Algorithm) and names.algorithm_source is None
        return replace(
            self,
            task=names.task_source or names.task,
            algorithm=self.algorithm if registered else names.algorithm_source or names.algorithm,
            cohort=function_reference(self.cohort) or self.cohort,
            local=local,
            options={n: option_text(v) if callable(v) else v for n, v in options.items()},
        )

    @property
    def references(self) -> list[str]:
        """References to the task, the algorithm and functions, where they are the user's."""
        other = self.portable
        texts = (other.task, other.algorithm, other.cohort, *other.options.values())
        return [text for text in texts if isinstance(text, str) and is_reference(text)]

    @property
    def session_object(self) -> str | None:
        """What of the run exists in this process only, e.g. "task 'mine'"; None if nothing."""
        names = self.names
        if in_session(names.task_source):
            return f"task {names.task!r}"
        if in_session(names.algorithm_source):
            return f"algorithm {names.algorithm!r}"
        return "a function among the options" if any(map(in_session, self.references)) else None

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The run in full, as plain values: enough to repeat it.

        `set` has the options that differ from what task, algorithm and mode give by name, and
        `changed` names them; `arguments` and `options` have all, resolved. None is left out, and is
        "none" among options, as `--set` takes it.
        """
        exact: Any = self.resolved
        of_task, _ = split_task_options(self.options)
        arguments, usual = self._arguments(of_task), self._arguments({}) if of_task else None
        named, values = self._named_setup(exact.task), exact.setup.all_options()
        changes, before = exact.setup.changes_from(named), named.all_options()
        different = [name for name in changes if before.get(name) != values[name]]
        changed = [f"task.{n}" for n, v in arguments.items() if usual and usual.get(n) != v]
        start = self.start
        described = {
            "task": self.names.task,
            "algorithm": self.names.algorithm,
            "mode": self.mode,
            "seed": self.seed,
            "rounds": exact.rounds,
            "cohort": None if exact.cohort == "all" else exact.cohort,
            "clients": exact.task.train.clients,
            "evaluate_every": exact.evaluate_every,
            "engine": self.engine,
            "device": self.device,
            "precision": self.precision,
            "stop_at": exact.stop_at,
            "deterministic": self.deterministic,
            "task_source": self.names.task_source,
            "algorithm_source": self.names.algorithm_source,
            "cohort_source": function_reference(self.cohort),
            "by_client": self.by_client or None,
            "start": None if start is None else weights_digest(start),
            "start_source": os.fspath(start) if isinstance(start, str | os.PathLike) else None,
            "privacy": None if self.privacy is None else privacy_table(self.privacy),
            "set": {f"task.{n}": option_text(v) for n, v in of_task.items()} | changes,
            "changed": [*changed, *(n for n in different if changes[n] != "none")],
            "arguments": arguments,
            "options": exact.setup.options(),
        }
        return {name: plain(value) for name, value in described.items() if value is not None}

    @property
    def id(self) -> str:
        """Task, algorithm, seed and a digest of the resolved options; names the run's folder."""
        return id_of(self.spec)

    def _arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the task, resolved; its seed only where it is not the run's."""
        arguments = catalogue.task_arguments(self.task, options, self.seed, self.mode)
        return {n: v for n, v in arguments.items() if (n, v) != ("seed", self.seed)}

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Experiment:
        """Return the experiment of a `spec`; names are resolved when it is used.

        Raises `UsageError` for a value that no experiment has.
        """
        values = {name: spec[name] for name in FIELDS if name in spec}
        cohort = spec.get("cohort_source") or spec.get("cohort", "all")
        by_function = isinstance(cohort, str) and cohort != "all" and not is_reference(cohort)
        privacy = spec.get("privacy")
        return cls(
            **values
            | {
                "task": spec.get("task_source") or spec["task"],
                "algorithm": spec.get("algorithm_source") or spec["algorithm"],
                "cohort": None if by_function else cohort,  # a function of the task's own
                "options": spec.get("set", {}),
                "start": spec.get("start_source"),
                "privacy": None if privacy is None else privacy_from(privacy),
            }
        )

    def evaluates(self, round: int) -> bool:
        """Return whether a resolved run is evaluated in a round."""
        every = self.evaluate_every
        often, last = every if isinstance(every, tuple) else (every or 1, 1)
        return round % often == 0 or round > (self.rounds or 0) - last

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row of a round has reached `stop_at`."""
        stop_at, value = self.resolved.stop_at, row.get(self.problem.metric)
        if stop_at is None or value is None:
            return False
        higher = self.problem.goal.higher
        goal = allow_rounding(stop_at, higher)
        return bool(value >= goal if higher else value <= goal)

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether no round is left after these rows."""
        return bool(rows) and (len(rows) >= self.length or self.reached(rows[-1]))


FIELDS = tuple(each.name for each in fields(Experiment))
DEFAULTS: dict[str, Any] = {"options": {}} | {
    each.name: each.default
    for each in fields(Experiment)
    if each.default is not None and each.default is not MISSING
}


def simulate(
    task: Task | str,
    algorithm: Algorithm | str = "fedexp",
    rounds: int | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    *,
    start: SimulationState | Start | None = None,
    client_store: Location | ClientStore = "auto",
    process_group: ProcessGroup | None = None,
    **options: Unpack[Options],
) -> Iterator[Record]:
    """Train, and yield one `Record` per round. Stop when you like: the consumer is in charge.

    Arguments are checked at the call, before the first round. All but these are fields of
    `Experiment`, which this call builds. A record holds its state, so a list of all records holds
    all models in memory.

    Args:
        start: a state (`record.state`) to continue from, of the same task and algorithm. A record,
            a module, a state_dict or a file is a warm start instead: round 0 and fresh states of
            server and clients, from these weights; of a record those of its output model, and what
            it has released (docs/privacy.md).
        client_store: where client state (SCAFFOLD's) is stored: "memory", "disk", or "auto" for a
            file if it could exceed a quarter of the memory. Does not affect results.
        process_group: the processes that share the run, e.g. `fedexp.distributed.DistributedGroup`.

    >>> from fedexp.algorithms import fedexp
    >>> from fedexp.tasks import toy
    >>> [round(r.server_lr, 6) for r in simulate(toy(), fedexp(eps=0, factor=1), rounds=4)]
    [1.2, 6.0, 1.2, 6.0]
    """
    state, warm = (start, None) if isinstance(start, SimulationState) else (None, start)
    check_names(options)
    chosen: Any = {"rounds": rounds, "cohort": cohort, "start": warm, **options}
    resources = Resources(client_store=client_store, process_group=process_group)
    return Experiment(task, algorithm, seed, **chosen).records(state, resources)


def check_names(values: Mapping[str, Any]) -> None:
    """Refuse a keyword that is not a field of `Experiment`."""
    for name in values:
        check_name("argument", name, FIELDS)


def experiments(
    task: Task | str,
    algorithms: Sequence[Algorithm | str],
    seed: int,
    settings: Settings,
) -> list[Experiment]:
    """Return an experiment of each algorithm over one task; `name:key` options are for one.

    All are resolved, so that a mistake in one is reported before anything is trained.
    """
    of_task, others = split_task_options(settings.get("options") or {})
    for_task = {f"task.{name}": value for name, value in of_task.items()}
    bare: dict[str, Experiment] = {}
    common: Any = {**settings, "options": for_task}
    first: Experiment | None = None
    for algorithm in algorithms:
        experiment = Experiment(task, algorithm, seed, **common).sharing(first)
        first = first or experiment
        name = experiment.names.algorithm
        require(
            name not in bare,
            f"two algorithms are called {name!r}; give one another name, e.g. "
            'dataclasses.replace(algorithm, name="...")',
        )
        _ = experiment.resolved
        bare[name] = experiment
    shared = share_options({name: each.setup for name, each in bare.items()}, others)
    chosen = [each.with_options(shared[name]).sharing(first) for name, each in bare.items()]
    for experiment in chosen:
        _ = experiment.resolved
    return chosen


def allow_rounding(target: float, higher: bool) -> float:
    """Return the target less the rounding error of a metric that is a mean of fractions.

    So that 0.7199999999999 is 72 %, as it is once a run is archived with fewer digits.

    >>> 0.1 + 0.7 >= 0.8, 0.1 + 0.7 >= allow_rounding(0.8, higher=True)
    (False, True)
    """
    slack = ROUNDING * abs(target)
    return target - slack if higher else target + slack


def _plain_cohort(cohort: Any) -> Any:
    """Return a cohort in plain values: numbers of numpy as Python's, a list of clients as a tuple.

    The fraction 1.0 is all clients; the number 1 is one client.

    >>> _plain_cohort(np.array([3, 1])), _plain_cohort(np.int64(1)), _plain_cohort(1.0)
    ((3, 1), 1, 'all')
    """
    if isinstance(cohort, np.ndarray | np.generic):
        return _plain_cohort(cohort.tolist())
    if cohort is None or callable(cohort) or isinstance(cohort, bool):
        return cohort
    if isinstance(cohort, str):
        good = cohort == "all" or is_reference(cohort)
        kinds = 'a number, a fraction, "all", a list of clients or a function'
        require(good, f"cohort {cohort!r} is not {kinds}")
        return cohort
    if isinstance(cohort, Integral):
        return whole_number("the cohort", cohort, 1)
    if isinstance(cohort, Real):
        return "all" if cohort == 1 else float(cohort)
    if not isinstance(cohort, Sequence):
        return cohort
    return tuple(item.item() if isinstance(item, np.generic) else item for item in cohort)


def _evaluations(every: Any) -> Any:
    """Return how often to evaluate, in plain values."""
    if not isinstance(every, Sequence) or isinstance(every, str):
        return None if every is None else whole_number("evaluate_every", every, 1)
    pair = len(every) == 2
    require(pair, f"evaluate_every is a number of rounds or two, (every, last), not {every!r}")
    return tuple(whole_number("evaluate_every", number, 1) for number in every)


def _check_kinds(experiment: Experiment) -> None:
    """Refuse values whose type would fail later, or have another meaning."""
    rule = 'fedexp.Algorithm("name", client=..., server=...) of it'
    for value, kind, what, place, example in (
        (experiment.task, Task, "a Task", "fedexp.tasks.", "digits"),
        (experiment.algorithm, Algorithm, "an Algorithm", "fedexp.", "fedexp"),
    ):
        if isinstance(value, type | FunctionType):
            name = example if isinstance(value, type) else value.__name__
            raise UsageError(
                f"{value.__name__} is not {what} until it is called; give {place}{name}()"
            )
        remedy = rule if isinstance(value, ServerRule | ClientRule) else f"{place}{example}()"
        good = isinstance(value, kind | str)
        require(good, f"{type(value).__name__} is not {what} or the name of one; give {remedy}")
    for name, kinds, example in KINDS:
        value = getattr(experiment, name)
        fits = value is None or isinstance(value, kinds)
        require(fits, f"{name} is {type(value).__name__}; give {example}")
    texts = (experiment.task, experiment.algorithm, experiment.start, experiment.cohort)
    for text in (*texts, *map(str, experiment.options)):
        require(not isinstance(text, str) or text.isprintable(), f"{shown(text)} is not a name")
    if experiment.privacy is not None:
        privacy_table(experiment.privacy)  # refuses other types
    weighting = experiment.weighting
    known = weighting in (None, "uniform", "size")
    require(known, f"weighting is uniform or size, not {weighting!r}")


KINDS: tuple[tuple[str, Any, str], ...] = (
    ("local", LocalTraining, "fedexp.LocalTraining(lr=...)"),
    ("options", Mapping, 'values by name, e.g. {"eps": 0.01}'),
    ("mode", str, '"paper", "authors-code" or "recommended"'),
    ("engine", str, '"auto", or the name of an engine'),
    ("device", str | torch.device, 'e.g. "cuda"'),
    ("precision", str, '"float32", "tf32" or "bf16"'),
    ("deterministic", bool, "True or False"),
    ("by_client", bool, "True or False"),
    ("stop_at", Real, "a number"),
    (
        "start",
        Record | nn.Module | Mapping | str | os.PathLike,
        "a record, a module, a state_dict, a run folder or a safetensors file",
    ),
)
