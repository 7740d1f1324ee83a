"""An experiment as data: `Spec`, the `Run` that it resolves to, its `Outcome`, and `spec.toml`.

A spec has the names that a user types. `Spec.check` needs neither data nor model; `Spec.prepare`
builds the task and resolves every option. The resolved spec, with all options, is what `spec.toml`
stores, and the id of a run is a digest of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
import torch

from fedexp.cohorts import Cohort
from fedexp.engine import EngineName, Record, simulate
from fedexp.engine.client_store import ClientStore
from fedexp.engine.plan import CohortRule
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from fedexp.engine.warm_start import starting_from
from fedexp.errors import UsageError, require, shown, unknown_name
from fedexp.options import (
    Setup,
    build_algorithm,
    build_task,
    check_options,
    convert,
    hints_of,
    setup_for,
    split_task_options,
    task_arguments,
)
from fedexp.precision import Precision, checked_device
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy
from fedexp.references import in_session, is_reference, load_object
from fedexp.runs.checkpoint import read_weights, weights_digest
from fedexp.runs.digest import SOURCE, digest_of
from fedexp.runs.files import Row, parse_toml, spec_fault
from fedexp.runs.fingerprint import Fingerprint, fingerprint
from fedexp.tasks import Task

if TYPE_CHECKING:
    from fedexp.engine.programs import SharedPrograms

PRIVACY: dict[str, type[CentralPrivacy] | type[LocalPrivacy]] = {
    "central": CentralPrivacy,
    "local": LocalPrivacy,
}
SMALL_MODEL = 100_000  # parameters
ROUNDING = 1e-9  # relative to a target
MOST_ROUNDS = 10**9  # more cannot be stored in a spec


@dataclass(frozen=True)
class Spec:
    """All choices of one run, by name, as the command line takes them.

    Args:
        task: name of the task.
        algorithm: name of the algorithm.
        seed: seed of the data, the initial weights, the cohorts and the batches.
        rounds: number of rounds; None for the task's default.
        cohort: clients per round: a number, a fraction, a list of clients, a function by its
            reference (`study.py:choose`), 0 or "all" for all; None for the task's default.
        mode: "paper" for the values tuned for the task, "authors-code" for what the released code
            does, or "recommended" for what this project advises.
        evaluate_every: rounds between evaluations; None for the task's default.
        engine: "auto", or the name of one: "loop", "threads", "batched", "dense", "quadratic".
        device: e.g. "cuda"; None for the CPU.
        precision: "float32", "tf32" or "bf16"; None for the default of the device.
        stop_at: value of the task's metric at which the run ends early; accuracies may be percent.
        deterministic: use deterministic torch operations only, on a GPU too.
        options: pairs of dotted names and values; `task.*` are arguments of the task.
        task_source: reference to a task of the user's own, e.g. `study.py:task`.
        algorithm_source: reference to an algorithm of the user's own; it is taken as it is, without
            the task's tuned values.
        privacy: differential privacy, simulated; None for none.
        start: safetensors file or run folder whose weights training begins with; None for the
            task's own initial weights.
        by_client: also evaluate every client, for the worst decile.
    """

    task: str
    algorithm: str
    seed: int = 0
    rounds: int | None = None
    cohort: int | float | tuple[int, ...] | str | None = None
    mode: str = "paper"
    evaluate_every: int | None = None
    engine: EngineName = "auto"
    device: str | None = None
    precision: Precision | None = None
    stop_at: float | None = None
    deterministic: bool = False
    options: tuple[tuple[str, str], ...] = ()
    task_source: str | None = None
    algorithm_source: str | None = None
    privacy: CentralPrivacy | LocalPrivacy | None = None
    start: str | None = None
    by_client: bool = False

    @property
    def in_session(self) -> bool:
        """Whether the task, the algorithm or a function exists in this process only."""
        return any(map(in_session, self.references))

    @property
    def references(self) -> list[str]:
        """References to the task, the algorithm and functions, where they are the user's own."""
        own = (self.task_source, self.algorithm_source, self.cohort, *dict(self.options).values())
        return [each for each in own if isinstance(each, str) and is_reference(each)]

    def check(self) -> None:
        """Raise `UsageError` for an unknown name or an option of the wrong type.

        Reads no data and builds no model. What depends on them is checked by `prepare`. A file of
        the user's own is imported.
        """
        sources = self.task_source, self.algorithm_source
        check_options(self.task, self.algorithm, dict(self.options), self.mode, *sources)

    def prepare(self, task: Task | None = None) -> Run:
        """Resolve every name; raise `UsageError` for what does not exist or does not fit.

        Args:
            task: the spec's own task where it has been built before.
        """
        of_task, others = split_task_options(dict(self.options))
        if task is None:
            self.check()
            task = build_task(self.task, of_task, self.seed, self.mode, self.task_source)
        algorithm = build_algorithm(self.algorithm, self.algorithm_source)
        if self.algorithm_source is None:
            setup = setup_for(task, algorithm, self.mode, others)
        else:
            setup = Setup(algorithm, task.local).with_options(others)
        if self.by_client and not task.by_client:
            task = replace(task, by_client=True)
        if self.start is not None:
            task = starting_from(task, read_weights(Path(self.start)), self.seed)
        cohort: Any = task.cohort if self.cohort is None else self.cohort
        if isinstance(cohort, str) and cohort != "all":
            require(is_reference(cohort), f"cohort {cohort!r} is no number, no list and not all")
            cohort = load_object(cohort)
        zero = isinstance(cohort, Integral) and not isinstance(cohort, bool) and cohort == 0
        cohort = None if zero or isinstance(cohort, str) or is_all_clients(cohort) else cohort
        CohortRule.of(cohort, task.train.clients)  # raises where it does not fit
        stop_at = task.checked_target(self.stop_at, "stop_at")
        rounds = task.rounds if self.rounds is None else self.rounds
        require(rounds >= 1, f"rounds must be at least 1, not {rounds}")
        require(rounds <= MOST_ROUNDS, f"rounds must be at most {MOST_ROUNDS:,}, not {rounds}")
        return Run(self, task, setup, rounds, plain_cohort(cohort), stop_at)


@dataclass(frozen=True, eq=False)
class Run:
    """A spec with its names resolved."""

    spec: Spec
    task: Task
    setup: Setup
    rounds: int
    cohort: Cohort | None  # None for all clients
    stop_at: float | None = None

    @property
    def is_small(self) -> bool:
        """Whether splitting an operation over threads costs more than it saves."""
        return self.task.objective.initial(self.spec.seed)[0].numel() < SMALL_MODEL

    @property
    def device(self) -> torch.device:
        """The device that `simulate` trains on; raises `UsageError` where it is not available."""
        data = next(iter(self.task.train.fields.values()))
        return checked_device(self.spec.device or data.device)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digests of the data, the initial model and the code, computed at first use."""
        functions = {f"local.{n}": v for n, v in vars(self.setup.local).items() if callable(v)}
        if callable(self.cohort):
            functions["cohort"] = self.cohort
        stops = self.stop_at is not None
        return fingerprint(self.task, self.setup.algorithm, self.spec.seed, functions, stops)

    @cached_property
    def frozen(self) -> dict[str, Any]:
        """The resolved spec as TOML holds it: everything that decides what the run computes.

        TOML has no null: None is left out at the top level, and is "none" among options, as `--set`
        takes it.
        """
        described = {name: value for name, value in self.describe().items() if value is not None}
        return tomllib.loads(tomli_w.dumps(_toml_value(described)))

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row of a round has reached `stop_at`."""
        value = row.get(self.task.metric)
        if self.stop_at is None or value is None:
            return False
        higher = self.task.goal.higher
        goal = allow_rounding(self.stop_at, higher)
        return bool(value >= goal if higher else value <= goal)

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether no round is left after these rows."""
        return bool(rows) and (len(rows) >= self.rounds or self.reached(rows[-1]))

    def records(
        self,
        start: SimulationState | None = None,
        client_store: ClientStore | None = None,
        process_group: ProcessGroup | None = None,
        programs: SharedPrograms | None = None,
    ) -> Iterator[Record]:
        """Train; yield one record per round, from the beginning or from an earlier state.

        Arguments are checked at the call. Training does not end at `stop_at`: the caller ends it.
        """
        return simulate(
            self.task,
            self.setup.algorithm,
            self.rounds,
            "all" if self.cohort is None else self.cohort,
            self.spec.seed,
            local=self.setup.local,
            weighting=self.setup.weighting,
            evaluate_every=self.spec.evaluate_every,
            engine=self.spec.engine,
            device=self.spec.device,
            precision=self.spec.precision,
            start=start,
            client_store=client_store or ClientStore(),
            process_group=process_group,
            privacy=self.spec.privacy,
            programs=programs,
        )

    def describe(self) -> dict[str, Any]:
        """Return the run in full, as plain values: enough to repeat it.

        `set` has options as they were typed, and `changed` names those that have another value than
        the task and the mode give them; `arguments` and `options` have all of them, resolved.
        """
        resolved = self._resolved()
        before: dict[str, Any] = resolved
        if self.spec.options:
            before = replace(self.spec, options=()).prepare(self.task)._resolved()
        spec, cohort = self.spec, self.cohort
        by_reference = isinstance(spec.cohort, str) and is_reference(spec.cohort)
        return {
            "task": self.spec.task,
            "algorithm": self.spec.algorithm,
            "mode": self.spec.mode,
            "seed": self.spec.seed,
            "rounds": _json_value(self.rounds),
            "cohort": _json_value(cohort),
            "clients": self.task.train.clients,
            "evaluate_every": _json_value(spec.evaluate_every or self.task.evaluate_every),
            "engine": self.spec.engine,
            "device": self.spec.device,
            "precision": self.spec.precision,
            "stop_at": _json_value(self.stop_at),
            "deterministic": self.spec.deterministic,
            "task_source": self.spec.task_source,
            "algorithm_source": self.spec.algorithm_source,
            "cohort_source": spec.cohort if by_reference else None,
            "by_client": spec.by_client or None,
            "start": None if spec.start is None else weights_digest(Path(spec.start)),
            "start_source": spec.start,
            "privacy": None if spec.privacy is None else privacy_table(spec.privacy),
            "set": dict(self.spec.options),
            "changed": [n for n in resolved if n not in before or resolved[n] != before[n]],
            "arguments": self._arguments(),
            "options": {k: _json_value(v) for k, v in self.setup.options().items()},
        }

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of the task, resolved; its seed only where it is not the run's."""
        of_task, _ = split_task_options(dict(self.spec.options))
        spec = self.spec
        found = task_arguments(spec.task, of_task, spec.seed, spec.mode, spec.task_source)
        if found.get("seed") == spec.seed:
            del found["seed"]
        return {name: _json_value(value) for name, value in found.items()}

    def _resolved(self) -> dict[str, Any]:
        of_task = {f"task.{name}": value for name, value in self._arguments().items()}
        return of_task | effective_options(self.setup.options())


def is_all_clients(cohort: Any) -> bool:
    """Return whether a cohort is the fraction 1.0; the number 1 is one client.

    >>> is_all_clients(1.0), is_all_clients(1), is_all_clients(0.5)
    (True, False, False)
    """
    return isinstance(cohort, Real) and not isinstance(cohort, Integral) and cohort == 1


def plain_cohort(cohort: Any) -> Any:
    """Return a cohort in plain values: numbers of numpy as Python's, a list of clients as a tuple.

    >>> plain_cohort(np.array([3, 1])), plain_cohort(np.int64(4)), plain_cohort("all")
    ((3, 1), 4, 'all')
    """
    if cohort is None or isinstance(cohort, str | bool) or callable(cohort):
        return cohort
    if isinstance(cohort, Integral):
        return int(cohort)
    if isinstance(cohort, Real):
        return float(cohort)
    is_list = isinstance(cohort, Sequence | np.ndarray)
    return tuple(np.asarray(cohort).tolist()) if is_list else cohort


def _json_value(value: Any) -> Any:
    """Return a value as JSON holds it: infinity as `--set` takes it, an object by its digest."""
    if isinstance(value, np.ndarray | np.generic):
        return _json_value(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_json_value, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}-{digest_of(value)[SOURCE][:8]}"


def _toml_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _toml_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_toml_value, value))
    return "none" if value is None else value


OnRound = Callable[[Spec, Row], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a run: one row of numbers per round, and how it ended.

    Attributes:
        spec: what was run.
        rows: one per round.
        seconds: training time, over all processes that worked on the run.
        diverged_at: the round in which the run diverged, if it did.
        status: "finished", "diverged", "target" for one that stopped there, or "unfinished".
        reason: what diverged.
        folder: the run folder; None where nothing is stored.
        stored: number of rounds that were stored before.
        state: the last state of a run that is not stored; None otherwise.
    """

    spec: Spec
    rows: list[Row]
    seconds: float
    diverged_at: int | None = None
    status: str = "finished"
    reason: str = ""
    folder: Path | None = None
    stored: int = 0
    state: SimulationState | None = field(default=None, repr=False, compare=False)

    def curve(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return one number per round, NaN where it was not evaluated."""
        values = [row.get(name) for row in self.rows]
        known = [v if isinstance(v, int | float) else np.nan for v in values]
        return np.array(known, dtype=np.float64)


def allow_rounding(target: float, higher: bool) -> float:
    """Return the target less the rounding error of a metric that is a mean of fractions.

    So that 0.7199999999999 is 72 %, as it is once a run is archived with fewer digits.

    >>> 0.1 + 0.7 >= 0.8, 0.1 + 0.7 >= allow_rounding(0.8, higher=True)
    (False, True)
    """
    slack = ROUNDING * abs(target)
    return target - slack if higher else target + slack


FORMAT = 2
SPEC = "spec.toml"
HEAD = "# A run of fedexp, frozen. Continue it with: fedexp resume THIS-FOLDER\n"
# Options as they were typed, and where objects of the user's own are; not part of the id.
SOURCES = ("task_source", "algorithm_source", "cohort_source", "start_source")
TYPED = ("set", "changed", *SOURCES)
EPS = ("server.eps", "server.eps_mode")  # a number and its unit


def frozen(run: Run) -> dict[str, Any]:
    """Return the resolved spec of a run, see `Run.frozen`."""
    return dict(run.frozen)


def run_id(run: Run) -> str:
    """Return the id of a run: task, algorithm, seed and a digest of the resolved spec."""
    return id_of(run.frozen)


def folder_of(run: Run, root: Path) -> Path:
    """Return the folder of a run under `root`."""
    return root / id_of(run.frozen)


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run: `spec.toml` is written first."""
    return (path / SPEC).is_file()


def spec_text(spec: Mapping[str, Any], head: str = HEAD) -> str:
    """Return the text of `spec.toml` for a resolved spec."""
    return head + tomli_w.dumps({"format": FORMAT, "id": id_of(spec), **spec})


def read_spec(folder: Path) -> dict[str, Any]:
    """Return the content of `spec.toml`; refuse one that is damaged, edited or newer than this."""
    path = folder / SPEC
    try:
        spec = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder} is not a run: cannot read {SPEC}: {error.strerror}; name a run folder"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: {shown(error)}; remove {folder}, and run it again"
        ) from None
    check_format(spec, path)
    own = {name: value for name, value in spec.items() if name not in ("format", "id")}
    require(
        own.keys() >= {"task", "algorithm", "seed"} and spec.get("id") == id_of(own),
        f"{path} has been changed since the run began; put it back, or start another run",
    )
    fault = spec_fault(own)
    require(fault is None, f"{path} is not the spec of a run: {fault}; start another run")
    return spec


def check_format(spec: Mapping[str, Any], path: Path) -> None:
    """Refuse a spec of a format that this version does not read."""
    found = spec.get("format")
    require(
        type(found) is int and found == FORMAT,
        f"{path} has format {shown(found)}, this fedexp reads {FORMAT}; use the other one",
    )


def spec_from(spec: Mapping[str, Any]) -> Spec:
    """Return the `Spec` of a resolved spec."""
    return Spec(
        task=spec["task"],
        algorithm=spec["algorithm"],
        seed=spec["seed"],
        rounds=spec["rounds"],
        cohort=spec.get("cohort_source") or _cohort(spec.get("cohort", 0)),
        mode=spec["mode"],
        evaluate_every=spec["evaluate_every"],
        engine=spec["engine"],
        device=spec.get("device"),
        precision=spec.get("precision"),
        stop_at=spec.get("stop_at"),
        deterministic=spec["deterministic"],
        options=tuple(spec["set"].items()),
        task_source=spec.get("task_source"),
        algorithm_source=spec.get("algorithm_source"),
        privacy=privacy_from(spec["privacy"]) if "privacy" in spec else None,
        start=spec.get("start_source"),
        by_client=spec.get("by_client", False),
    )


def effective_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the number of steps where epochs count.

    >>> effective_options({"local.lr": 0.1, "local.steps": None, "local.epochs": 2})
    {'local.lr': 0.1, 'local.epochs': 2}
    """
    return {n: v for n, v in options.items() if n != "local.steps" or v not in (None, "none")}


def _cohort(value: Any) -> Any:
    """Return the cohort of a spec; None where it is a function of the task's own."""
    return None if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def privacy_table(privacy: CentralPrivacy | LocalPrivacy) -> dict[str, Any]:
    """Return privacy settings as TOML holds them, without those that are not set.

    >>> privacy_table(LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0))
    {'kind': 'local', 'clip': 1.0, 'delta': 1e-05, 'noise_multiplier': 2.0}
    """
    kind = "central" if isinstance(privacy, CentralPrivacy) else "local"
    fields = {n: v for n, v in vars(privacy).items() if v is not None}
    return {"kind": kind, **fields}


def privacy_from(table: Mapping[str, Any]) -> CentralPrivacy | LocalPrivacy:
    """Return the privacy settings of a table; the inverse of `privacy_table`."""
    fields = {name: value for name, value in table.items() if name != "kind"}
    return PRIVACY[table["kind"]](**fields)


def parse_privacy(text: str) -> CentralPrivacy | LocalPrivacy:
    """Return the privacy settings of a text such as `central:clip=1,delta=1e-5,epsilon=8`.

    >>> parse_privacy("local:clip=1,delta=1e-5,noise_multiplier=2").clip
    1.0
    """
    kind, _, listed = text.partition(":")
    if kind not in PRIVACY:
        raise unknown_name("kind of privacy", kind, PRIVACY)
    hints, given = hints_of(PRIVACY[kind]), {}
    for pair in filter(None, listed.split(",")):
        name, equals, value = (each.strip() for each in pair.partition("="))
        if name not in hints or not equals:
            raise unknown_name(f"setting of {kind} privacy", name, hints)
        given[name] = convert(value, hints[name], name)
    missing = [name for name in ("clip", "delta") if name not in given]
    require(
        not missing,
        f"privacy needs {' and '.join(missing)}, e.g. {kind}:clip=1,delta=1e-5,noise_multiplier=1",
    )
    return PRIVACY[kind](**given)


def check_same(spec: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue a run as another one: an option may have changed its default since."""
    typed = ("format", "id", *TYPED)
    now, then = (
        _flat({name: value for name, value in resolved.items() if name not in typed})
        for resolved in (wanted, spec)
    )
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if changed:
        name = changed[0]
        raise UsageError(
            f"{folder} holds another run: there {shown(name)} is {shown(then.get(name))}, here it "
            f"is {now.get(name)}; choose another folder"
        )


def id_of(spec: Mapping[str, Any]) -> str:
    """Return the id of a resolved spec.

    Options count as they are resolved, not as they were typed.

    >>> spec = {"task": "toy", "algorithm": "fedexp", "seed": 0, "options": {"server.eps": 0.0}}
    >>> id_of({**spec, "set": {"eps": "0"}}) == id_of({**spec, "set": {}}) == id_of(spec)
    True
    """
    resolved = {name: value for name, value in spec.items() if name not in TYPED}
    text = json.dumps(_canonical(resolved), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{id_stem(spec['task'], spec['algorithm'], spec['seed'])}-{digest}"


def id_stem(task: str, algorithm: str, seed: int) -> str:
    """Return the readable part of a run's id; characters that paths cannot have are replaced.

    >>> id_stem("my task", "fedexp", 0)
    'my_task-fedexp-s0'
    """
    return f"{file_name(task)}-{file_name(algorithm)}-s{seed}"


def file_name(name: str) -> str:
    """Return a name as a part of a file name.

    >>> file_name("a/b c")
    'a_b_c'
    """
    return re.sub(r"[^\w.+-]+", "_", name)


def _canonical(value: Any) -> Any:
    """Write equal numbers as the same text: 1 and 1.0, 0 and -0.0."""
    if isinstance(value, Mapping):
        return {name: _canonical(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: value for name, value in spec.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in spec.items() if name not in tables}
    return flat | {f"{t}.{k}": v for t, values in tables.items() for k, v in values.items()}
