"""`Spec`: an experiment as data, and the run that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.engine import EngineName, Record, simulate
from fedexp.engine.keep_clients import KeepClients
from fedexp.engine.sharing import Sharing
from fedexp.engine.state import SimulationState
from fedexp.errors import UsageError, unknown_name
from fedexp.experiments.catalog import build_task, task_arguments
from fedexp.experiments.fingerprint import Fingerprint, fingerprint
from fedexp.experiments.setup import Setup, setup_for, split_task_options
from fedexp.precision import Precision
from fedexp.tasks import Task

SMALL_MODEL = 100_000  # parameters
ROUNDING = 1e-9  # of a target


@dataclass(frozen=True)
class Spec:
    """All choices of one run, by name, as the command line takes them.

    Args:
        task: name of the task.
        algorithm: name of the algorithm.
        seed: of the data, the initial weights, the cohorts and the batches.
        rounds: None for the task's own number.
        cohort: clients a round; None for the task's own number, 0 for all clients.
        mode: "paper", or "authors-code" for what the released code does.
        evaluate_every: rounds between evaluations; None for the task's own number.
        engine: "auto", or the name of one: "loop", "threads", "batched", "dense", "quadratic".
        device: e.g. "cuda"; None for the CPU.
        precision: "float32", "tf32" or "bf16"; None for what suits the device.
        stop_at: value of the task's metric at which the run ends early; accuracies may be percent.
        deterministic: ask torch for the same bits every time, on a GPU too.
        options: pairs of dotted names and values; `task.*` are arguments of the task.
    """

    task: str
    algorithm: str
    seed: int = 0
    rounds: int | None = None
    cohort: int | None = None
    mode: str = "paper"
    evaluate_every: int | None = None
    engine: EngineName = "auto"
    device: str | None = None
    precision: Precision | None = None
    stop_at: float | None = None
    deterministic: bool = False
    options: tuple[tuple[str, str], ...] = ()

    def prepare(self, task: Task | None = None) -> Run:
        """Resolve every name; raises `UsageError` for what does not exist or fit.

        `task` is the spec's own task where it has been built before.
        """
        if self.algorithm not in ALGORITHMS:
            raise unknown_name("algorithm", self.algorithm, ALGORITHMS)
        of_task, others = split_task_options(dict(self.options))
        task = task or build_task(self.task, of_task, self.seed, self.mode)
        setup = setup_for(task, ALGORITHMS[self.algorithm](), self.mode).with_options(others)
        cohort = task.cohort if self.cohort is None else self.cohort or None
        stop_at = checked_target(self.stop_at, task.metric, "--stop-at")
        return Run(self, task, setup, self.rounds or task.rounds, cohort, stop_at)


@dataclass(frozen=True, eq=False)
class Run:
    """A spec with its names resolved."""

    spec: Spec
    task: Task
    setup: Setup
    rounds: int
    cohort: int | None
    stop_at: float | None = None

    @property
    def is_small(self) -> bool:
        """Whether splitting an operation over threads costs more than it saves."""
        return self.task.objective.initial(0)[0].numel() < SMALL_MODEL

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digests of the data, the initial model and the code; reads them at its first use."""
        return fingerprint(self.task, self.setup.algorithm, self.spec.seed)

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has what the run was to stop at."""
        value = row.get(self.task.metric)
        if self.stop_at is None or value is None:
            return False
        higher = is_better_higher(self.task.metric)
        goal = allow_rounding(self.stop_at, higher)
        return bool(value >= goal if higher else value <= goal)

    def records(
        self,
        start: SimulationState | None = None,
        keep_clients: KeepClients | None = None,
        sharing: Sharing | None = None,
    ) -> Iterator[Record]:
        """Train; one record a round, from the beginning or from the state of an earlier record.

        Arguments are checked at the call. It does not end early at `stop_at`: its reader does.
        """
        return simulate(
            self.task,
            self.setup.algorithm,
            self.rounds,
            self.cohort,
            self.spec.seed,
            local=self.setup.local,
            weighting=self.setup.weighting,
            evaluate_every=self.spec.evaluate_every,
            engine=self.spec.engine,
            device=self.spec.device,
            precision=self.spec.precision,
            start=start,
            keep_clients=keep_clients or KeepClients(),
            sharing=sharing,
        )

    def _arguments(self) -> dict[str, Any]:
        """The arguments of the task, resolved; its seed only where it is not the run's."""
        of_task, _ = split_task_options(dict(self.spec.options))
        found = task_arguments(self.spec.task, of_task, self.spec.seed, self.spec.mode)
        if found.get("seed") == self.spec.seed:
            del found["seed"]
        return {name: _plain(value) for name, value in found.items()}

    def _changed(self) -> list[str]:
        if not self.spec.options:
            return []
        bare = replace(self.spec, options=()).prepare(self.task)
        now, before = self._resolved(), bare._resolved()
        return [name for name in now if name not in before or now[name] != before[name]]

    def _resolved(self) -> dict[str, Any]:
        of_task = {f"task.{name}": value for name, value in self._arguments().items()}
        return of_task | self.setup.options()

    def describe(self) -> dict[str, Any]:
        """The run in full, as plain values: enough to repeat it.

        `set` has options as they were typed, and `changed` names those that have another value than
        the task and the mode give them; `arguments` and `options` have every one, resolved.
        """
        return {
            "task": self.spec.task,
            "algorithm": self.spec.algorithm,
            "mode": self.spec.mode,
            "seed": self.spec.seed,
            "rounds": self.rounds,
            "cohort": self.cohort,
            "clients": self.task.train.clients,
            "evaluate_every": self.spec.evaluate_every or self.task.evaluate_every,
            "engine": self.spec.engine,
            "device": self.spec.device,
            "precision": self.spec.precision,
            "stop_at": self.stop_at,
            "deterministic": self.spec.deterministic,
            "set": dict(self.spec.options),
            "changed": self._changed(),
            "arguments": self._arguments(),
            "options": {k: _plain(v) for k, v in self.setup.options().items()},
        }


def _plain(value: Any) -> Any:
    """As JSON can hold it: infinity in words, as `--set` takes it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_better_higher(metric: str) -> bool:
    """Accuracies rise, losses fall."""
    return metric.endswith("accuracy")


def allow_rounding(target: float, higher: bool) -> float:
    """The target, less what rounding can cost a metric that is a mean of fractions.

    So that 0.7199999999999 is 72 %, as it is once a run is archived with fewer digits.

    >>> 0.1 + 0.7 >= 0.8, 0.1 + 0.7 >= allow_rounding(0.8, higher=True)
    (False, True)
    """
    slack = ROUNDING * abs(target)
    return target - slack if higher else target + slack


def checked_target(value: float | None, metric: str, option: str) -> float | None:
    """A value of the metric to reach; an accuracy above 1 is taken as percent.

    >>> checked_target(84, "test_accuracy", "--target"), checked_target(None, "train_loss", "")
    (0.84, None)
    """
    if value is None:
        return None
    rises = is_better_higher(metric)
    value = value / 100 if rises and value > 1 else value
    if not 0 < value < math.inf or (rises and value > 1):
        raise UsageError(f"{option} must be a positive loss, or an accuracy up to 1 (or 100 %)")
    return value
