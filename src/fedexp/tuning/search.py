"""Searches: which trials to run, and how they are scored.

A trial is a short run, stored as any other but without weights. The paper runs 50 rounds and takes
the training accuracy, averaged over the last 10 (App. D.3, docs/paper.md#tuning-protocol). A task
without accuracies is judged by its training loss, averaged in the same way.

Trials are run folders below `trials` in the folder of all runs: those of grids and of the rule of
thumb together, since a trial may be part of several; those of a free search in a folder of its own.
Processes share a search through them: the lock of a run folder is held while a process works on it,
and a finished trial is read by the others. What is to be run next follows from what is stored
(`Trials`, a queue of `fedexp.runs.pool`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

from fedexp.errors import DamagedError, ReasonError, UsageError, require, whole_number
from fedexp.experiment import Experiment, Row
from fedexp.optional import extra
from fedexp.options import split_task_options
from fedexp.plain import id_of
from fedexp.runs.fingerprint import fingerprint_of
from fedexp.runs.folder import FINGERPRINT, LOCK, RESULT, check_content, is_busy
from fedexp.runs.read import rows_and_result
from fedexp.runs.spec import PRUNED, TRIALS, Outcome
from fedexp.runs.workers import Job, Result
from fedexp.storage import disk_errors, lock_file, parse_json, write_json
from fedexp.tasks import Goal, Task
from fedexp.tuning import grids
from fedexp.tuning.grids import Point, Values

if TYPE_CHECKING:
    import optuna

ROUNDS, WINDOW = 50, 10
EARLY_EVALUATIONS = 4  # before the window, for pruning
WARMUP_ROUNDS = 10  # of a trial before it can be pruned
STARTUP_TRIALS = 5  # finished before one can be pruned
FREE_TRIALS = 30
EPS = "server.eps"
EPS_VALUES = grids.powers(
    [-3 + step / 2 for step in range(9)]
)  # half decades, as in the paper's grid
ASKED = "asked.json"  # the points of a free search, in the order in which they were asked for
OTHER_RUNS = "choose another folder of runs"

Protocol = Literal["paper", "free", "epsilon"]
OnTrialRow = Callable[[Point, Row], None]


@dataclass(frozen=True)
class TrialResult:
    """The score of a trial and how it came about.

    Attributes:
        score: metric averaged over the window; the worst possible value if the trial diverged or
            was pruned.
        diverged_at: round in which it diverged, if it did.
        pruned: whether it was stopped early.
        test: test accuracy (or loss) after the last round, not used for selection; None without
            test data.
        step: median server step size.
        averages: whether every server step size was 1, that of FedAvg.
    """

    score: float
    diverged_at: int | None = None
    pruned: bool = False
    test: float | None = None
    step: float | None = None
    averages: bool = False

    @property
    def failed(self) -> bool:
        """Whether it diverged or was pruned."""
        return self.pruned or self.diverged_at is not None


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        point: its values by option.
        result: its score.
        folder: its run folder; None where nothing is stored.
    """

    point: Point
    result: TrialResult
    folder: Path | None = None


@dataclass(frozen=True)
class Search:
    """What is tuned, and by which protocol.

    Attributes:
        base: what all trials have in common.
        protocol: "paper" for a grid, "free" for ranges, "epsilon" for the rule of thumb.
        values: per option the values of the grid, or the two ends of the range.
        size: number of trials.
    """

    base: Experiment
    protocol: Protocol
    values: Values
    size: int

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        grid: Mapping[str, Sequence[float]] | None = None,
        protocol: Protocol = "paper",
        trials: int = FREE_TRIALS,
    ) -> Search:
        """Return a search with the rounds and evaluations of trials; checked before any runs.

        Args:
            experiment: what to tune.
            grid: values by option; None for those of the protocol.
            protocol: see `Search`.
            trials: number of trials of a free search.
        """
        whole_number("trials", trials, 1)
        require(grid is None or protocol == "paper", f"protocol {protocol!r} takes no grid")
        require(experiment.stop_at is None, "trials run to their end; leave stop_at out")
        require(
            experiment.evaluate_every is None,
            "trials are evaluated as their score needs it; leave evaluate_every out",
        )
        rounds = experiment.rounds or ROUNDS
        early = window_of(rounds)[0] - 1
        every = max(1, early // EARLY_EVALUATIONS), min(WINDOW, rounds)
        base = experiment.replace(rounds=rounds, evaluate_every=every)
        setup, least_squares = base.setup, base.problem.sums
        _, fixed = split_task_options(base.options)
        if grid is not None:
            values = grids.check_none_fixed(grids.checked_grid(grid, setup), fixed)
        elif protocol == "epsilon":
            what = f"{base.names.algorithm} has no eps"
            extrapolates = EPS in setup.options()
            require(extrapolates, f"{what}; choose an algorithm that extrapolates, e.g. fedexp")
            values = grids.check_none_fixed({EPS: EPS_VALUES}, fixed)
        elif protocol == "free":
            _optuna()
            values = grids.without_fixed(grids.free_ranges(setup, least_squares), fixed)
        else:
            values = grids.without_fixed(grids.paper_grid(setup, least_squares), fixed)
        size = trials if protocol == "free" else len(grids.points(values))
        search = cls(base, protocol, values, size)
        for corner in grids.points({name: (own[0], own[-1]) for name, own in values.items()}):
            _ = search.at(corner).resolved
        search.first.records().close()  # refuses an engine or a device that does not fit
        return search

    @property
    def goal(self) -> Goal:
        """What trials are judged by."""
        return goal_of(self.base.problem)

    @property
    def metric(self) -> str:
        """The record field that trials are judged by."""
        return self.goal.metric

    @cached_property
    def first(self) -> Experiment:
        """The trial with the first value of every option."""
        return self.at({name: values[0] for name, values in self.values.items()})

    def at(self, point: Point) -> Experiment:
        """Return a trial."""
        return self.base.with_options(point)

    def spec_at(self, point: Point) -> dict[str, Any]:
        """Return what the id of a trial depends on, in no time: that of the first, with its values.

        Which other options change with one does not depend on its value.
        """
        numbers = {name: v if math.isfinite(v) else str(v) for name, v in point.items()}
        spec = self.first.spec
        return {**spec, "options": {**spec["options"], **numbers}}

    def choice(self, trials: Sequence[Trial]) -> Choice:
        """Return what the rule of thumb chooses, after trials of its first values."""
        return rule_of_thumb([each.result for each in trials], self.goal.higher)

    def folder(self, root: Path) -> Path:
        """Return the folder of the trials' run folders."""
        if self.protocol != "free":
            return root / TRIALS
        ranges = hashlib.sha256(json.dumps(self.values).encode()).hexdigest()[:10]
        return root / TRIALS / f"{self.base.id}-{ranges}"


class Trials:
    """The trials of a grid, as a queue of runs; see `RunQueue`.

    Any number of processes can work on them at a time: each takes those that no other has.

    Args:
        search: what to run.
        root: folder of all runs; None stores nothing.

    Attributes:
        folder: of the trials' run folders.
        points: values of the trials so far, by their numbers.
        outcomes: of those that are finished, as far as this process has read or run them.
        on_row: called with the values and every row of a trial.
    """

    def __init__(self, search: Search, root: Path | None) -> None:
        self.search, self.folder = search, None if root is None else search.folder(root)
        self.points = grids.points(search.values)
        self.outcomes: dict[int, Outcome] = {}
        self.on_row: OnTrialRow = lambda point, row: None
        self._running: dict[int, list[Row]] = {}  # in this process, with the rows so far
        self._agreed: bytes | None = None  # a fingerprint that has been compared

    @property
    def references(self) -> list[str]:
        return self.search.base.references

    def count_left(self) -> int:
        """Return how many trials have no outcome yet."""
        return sum(1 for _ in self._left())

    def trials(self) -> list[Trial]:
        """Return the finished trials, best first."""
        sign = -1 if self.search.goal.higher else 1
        trials = map(self._scored, sorted(self.outcomes))
        return sorted(trials, key=lambda each: (each.result.failed, sign * each.result.score))

    def _scored(self, number: int) -> Trial:
        outcome = self.outcomes[number]
        return Trial(self.points[number], result_of(outcome, self.search.goal), outcome.folder)

    def take(self) -> Job | None:
        for number in self._left():
            folder = self._folder_of(number)
            if number not in self._running and not (folder and is_busy(folder)):
                self._running[number] = []
                return Job(number, self.search.at(self.points[number]))
        return None

    def is_done(self) -> bool:
        return next(self._left(), None) is None

    def on_round(self, job: Job, row: Row) -> bool:
        self._running[job.key].append(row)
        self.on_row(self.points[job.key], row)
        return True

    def on_result(self, job: Job, result: Result) -> None:
        rows = self._running.pop(job.key)
        if isinstance(result, Outcome):
            self.outcomes[job.key] = result
        elif result == "stopped" and self.folder is None:  # a stored one is read from its folder
            self.outcomes[job.key] = Outcome.of(job.experiment.spec, rows, {"status": PRUNED})

    def _left(self) -> Iterator[int]:
        """Yield the numbers of the trials that no process has finished."""
        for number in range(len(self.points)):
            if number not in self.outcomes and (outcome := self._stored(number)) is not None:
                self.outcomes[number] = outcome
            if number not in self.outcomes:
                yield number

    def _folder_of(self, number: int) -> Path | None:
        return self.folder and self.folder / id_of(self.search.spec_at(self.points[number]))

    def _stored(self, number: int) -> Outcome | None:
        """Return the outcome of a finished trial; reads no spec, whose digest names the folder."""
        folder = self._folder_of(number)
        if folder is None or not (folder / RESULT).exists():
            return None
        path = folder / FINGERPRINT
        if (content := path.read_bytes() if path.exists() else b"") != self._agreed:
            try:
                check_content(folder, fingerprint_of(self.search.first))
            except ReasonError as error:
                message = f"{error.reason}; remove {self.folder}, or {OTHER_RUNS}"
                raise UsageError(message) from None
            self._agreed = content
        try:
            rows, result = rows_and_result(folder)
        except DamagedError as error:
            raise UsageError(f"{error.reason}; remove {folder} to run the trial again") from None
        spec = self.search.spec_at(self.points[number])
        return None if result is None else Outcome.of(spec, rows, result, folder=folder)


class EpsilonTrials(Trials):
    """The trials of the rule of thumb, in its order, up to the one that ends it."""

    def trials(self) -> list[Trial]:
        tried = takewhile(self.outcomes.__contains__, range(len(self.points)))
        trials = list(map(self._scored, tried))
        return trials[: self.search.choice(trials).tried]

    def _left(self) -> Iterator[int]:
        for number in super()._left():
            if self.search.choice(self.trials()).ended:
                return
            yield number


class FreeTrials(Trials):
    """The trials of Optuna's TPE over ranges; one worse than the median of the others is pruned.

    `ASKED` holds their values. A lock is held while it is read and written.
    """

    def __init__(self, search: Search, root: Path | None) -> None:
        super().__init__(search, root)
        self.points = []
        self._read_asked()

    def count_left(self) -> int:
        return max(super().count_left(), self.search.size - len(self.outcomes))

    def take(self) -> Job | None:
        with self._locked():
            self._read_asked()
            job = super().take()
            if job is None and len(self.points) < self.search.size:
                self.points.append(self._ask())
                if self.folder is not None:
                    write_json(self.folder / ASKED, self.points)
                job = super().take()
            return job

    def is_done(self) -> bool:
        return len(self.points) >= self.search.size and super().is_done()

    def on_round(self, job: Job, row: Row) -> bool:
        super().on_round(job, row)
        curve = self._curve(self._running[job.key])
        if row["round"] not in curve:
            return True
        super().count_left()  # reads what others have finished
        trial = self._study().ask()
        for number, value in curve.items():
            trial.report(value, number)
        return not trial.should_prune()

    def _locked(self) -> AbstractContextManager[Any]:
        if self.folder is None:
            return nullcontext()
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return lock_file(self.folder / LOCK, wait=True)

    def _read_asked(self) -> None:
        path, ranges = self.folder and self.folder / ASKED, self.search.values.items()
        if path is None or not path.exists():
            return
        try:
            asked = parse_json(path.read_bytes())
            self.points = [{name: float(point[name]) for name, _ in ranges} for point in asked]
            if not all(a <= point[n] <= b for point in self.points for n, (a, b) in ranges):
                raise ValueError("a value is out of its range")
        except (ValueError, TypeError, LookupError, OverflowError):
            message = f"{path} is damaged; remove {self.folder}, or {OTHER_RUNS}"
            raise UsageError(message) from None

    def _ask(self) -> Point:
        """Return the values of the next trial; those of the first are the task's own."""
        ranges, usual = self.search.values.items(), self.search.base.setup.options()
        study = self._study()
        if not self.points:
            inside = {n: float(usual[n]) for n, (low, high) in ranges if low <= usual[n] <= high}
            study.enqueue_trial(inside)
        trial = study.ask()
        return {name: trial.suggest_float(name, *ends, log=True) for name, ends in ranges}

    def _study(self) -> optuna.Study:
        """Return a study in memory, of all finished trials."""
        optuna, goal = _optuna(), self.search.goal
        log_scale, state = optuna.distributions.FloatDistribution, optuna.trial.TrialState
        kinds = {n: log_scale(*ends, log=True) for n, ends in self.search.values.items()}
        # Another seed per trial, so that no two processes draw the same values.
        seed = self.search.base.seed + 1000 * len(self.points)
        study = optuna.create_study(
            direction="maximize" if goal.higher else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed),
            pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, WARMUP_ROUNDS),
        )
        for number, outcome in sorted(self.outcomes.items()):
            result = result_of(outcome, goal)
            trial = optuna.trial.create_trial(
                state=state.PRUNED if result.pruned else state.COMPLETE,
                value=None if result.pruned else result.score,
                params=self.points[number],
                distributions=kinds,
                intermediate_values=self._curve(outcome.rows),
            )
            study.add_trial(trial)
        return study

    def _curve(self, rows: Sequence[Row]) -> dict[int, float]:
        """Return the metric by round, where it was evaluated."""
        known = ((row["round"], row.get(self.search.metric)) for row in rows)
        return {round: value for round, value in known if value is not None}


def _optuna() -> Any:
    optuna = extra("optuna", "a free search", group="tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


QUEUES: dict[Protocol, type[Trials]] = {
    "paper": Trials,
    "free": FreeTrials,
    "epsilon": EpsilonTrials,
}


@dataclass(frozen=True)
class Choice:
    """The eps that the rule of thumb chose.

    Attributes:
        eps: last value before the drop.
        tried: number of values up to the end of the search.
        ended: "drop", "average" if every step size was 1, "edge" after the last value, or "" while
            further values are to be tried.
    """

    eps: float
    tried: int
    ended: Literal["drop", "average", "edge", ""]


def rule_of_thumb(results: Sequence[TrialResult], higher: bool) -> Choice:
    """Raise eps until the score drops (App. D.4, docs/paper.md#epsilon-rule-of-thumb).

    The search also ends where every server step size is 1, because a larger eps changes nothing
    from there on, and at 10.

    Args:
        results: of the first of `EPS_VALUES`.
        higher: whether larger scores are better.

    >>> choice = rule_of_thumb([TrialResult(score) for score in (0.7, 0.8, 0.75, 0.9)], True)
    >>> round(choice.eps, 5), choice.ended, choice.tried
    (0.00316, 'drop', 3)
    """
    for number, result in enumerate(results):
        before = results[max(0, number - 1)].score
        if result.score < before if higher else result.score > before:
            return Choice(EPS_VALUES[number - 1], number + 1, "drop")
        if result.averages:
            return Choice(EPS_VALUES[number], number + 1, "average")
    last = max(0, len(results) - 1)
    return Choice(EPS_VALUES[last], len(results), "edge" if last + 1 == len(EPS_VALUES) else "")


def goal_of(task: Task) -> Goal:
    """Return what trials of a task are judged by: training accuracy or loss, as in the paper.

    A task whose goal is a metric of its own is judged by that one.
    """
    of_training = task.metric.replace("test_", "train_", 1)
    if task.has_own_metric or of_training not in task.measured:
        return task.goal
    return Goal(of_training, task.goal.higher)


def worst_score(goal: Goal) -> float:
    """Return the score of a trial that diverged, was pruned, or whose metric is not a number."""
    if goal.higher:
        return 0.0 if goal.metric.endswith("accuracy") else -math.inf
    return math.inf


def score_of(rows: Sequence[Row], metric: str) -> float:
    """Return the metric averaged over the last `WINDOW` rounds, all of which are evaluated.

    NaN where it is not a number in one of them.

    >>> score_of([{"train_loss": float(k)} for k in range(20)], "train_loss")
    14.5
    """
    values = [row[metric] for row in rows[-WINDOW:]]
    return math.nan if None in values else mean(values)


def window_of(rounds: int) -> tuple[int, int]:
    """Return the first and the last round of the window.

    >>> window_of(50)
    (41, 50)
    """
    return max(1, rounds - WINDOW + 1), rounds


def result_of(outcome: Outcome, goal: Goal) -> TrialResult:
    """Return the result of a trial."""
    rows, pruned = outcome.rows, outcome.status == PRUNED
    ended = pruned or outcome.diverged_at is not None
    score = math.nan if ended else score_of(rows, goal.metric)
    steps = [row["server_lr"] for row in rows if row["server_lr"] is not None]
    last = rows[-1] if rows else {}
    return TrialResult(
        worst_score(goal) if math.isnan(score) else score,
        outcome.diverged_at,
        pruned,
        test=last.get(goal.metric.replace("train_", "test_")),
        step=median(steps) if steps else None,
        averages=bool(steps) and all(step == 1 for step in steps),
    )
