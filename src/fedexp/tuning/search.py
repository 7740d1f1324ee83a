"""Searches: which trials of a study to run, and how a trial is run and scored.

A study is searched point by point over a grid, by Optuna's TPE with pruning, or by the paper's rule
of thumb for eps. A search is a queue of runs (`fedexp.runs.pool.RunQueue`): the pool executes its
trials in this process, in worker processes or over ranks, and the search alone reads and writes the
study.

A trial is a short run. The paper runs 50 rounds and takes the training accuracy, averaged over the
last 10 (App. D.3, docs/paper.md#tuning-protocol). A task without accuracies is judged by its
training loss, averaged in the same way.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from fedexp.analysis.tables import format_value
from fedexp.distributed import Ranks
from fedexp.engine import Record
from fedexp.engine.client_store import ClientStore
from fedexp.engine.programs import SharedPrograms
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from fedexp.errors import NonFiniteUpdateWarning, require
from fedexp.experiment import Row
from fedexp.runs.pool import jobs_for, run_queue, runs_per_rank
from fedexp.runs.spec import SOURCES, Outcome, Run, Spec
from fedexp.runs.workers import Execution, Executor, Job, Result
from fedexp.tasks import Goal, Task
from fedexp.tuning.grids import Point, Values, points, powers
from fedexp.tuning.store import FINGERPRINT, StudyStore, Trial, TrialResult, open_study

ROUNDS, WINDOW = 50, 10
EARLY_EVALUATIONS = 4  # before the window, for pruning
EPS = "server.eps"
EPS_VALUES = powers([-3 + step / 2 for step in range(9)])  # half decades, as in the paper's grid

Protocol = Literal["paper", "free", "epsilon"]
OnRow = Callable[[Point, Row], None]
Progress = Callable[[int], AbstractContextManager[OnRow]]


@dataclass(frozen=True)
class Study:
    """What is tuned, by which protocol, and where the scores are stored.

    Attributes:
        run: what all trials have in common.
        protocol: "paper" for a grid, "free" for ranges, "epsilon" for the rule of thumb.
        values: per option the values of the grid, or the two ends of the range.
        path: the SQLite file.
        trials: number of trials of a free search.
    """

    run: Run
    protocol: Protocol
    values: Values
    path: Path
    trials: int = 0

    @property
    def goal(self) -> Goal:
        """What trials are judged by."""
        return goal_of(self.run.task)

    @property
    def metric(self) -> str:
        return self.goal.metric

    @property
    def size(self) -> int:
        """Number of trials of the whole study."""
        return self.trials if self.protocol == "free" else len(points(self.values))

    def spec_at(self, point: Point) -> Spec:
        """Return the spec of one trial."""
        options = tuple((name, repr(value)) for name, value in point.items())
        return replace(self.run.spec, options=(*self.run.spec.options, *options))

    def settings(self) -> dict[str, Any]:
        """Return all that decides the scores; a study resumes with the same settings only."""
        described = self.run.describe()
        for name in ("evaluate_every", *SOURCES):
            described.pop(name)  # trials have their own evaluations, and files may move
        for name in ("by_client", "start", "privacy"):
            if described[name] is None:
                described.pop(name)
        return {
            "protocol": self.protocol,
            **described,
            "values": {name: list(values) for name, values in self.values.items()},
            "metric": self.metric,
            "window": WINDOW,
            FINGERPRINT: self.run.fingerprint.to_json(),
        }

    def open(self) -> AbstractContextManager[StudyStore]:
        """Create or open the stored study, for a `with` block."""
        spec = self.run.spec
        name = f"{spec.task} {spec.algorithm} {self.protocol}"
        higher = self.goal.higher
        return open_study(self.path, name, self.settings(), self.values, higher, spec.seed)


@dataclass(frozen=True)
class TrialRunner:
    """How trials are run; none of it changes a score.

    Attributes:
        jobs: trials at a time, each in a process with one thread if there are several.
        ranks: the ranks of a job, which all tune the same study; `jobs` is not used then.
        progress: called with the number of trials that this process is going to run; the context
            manager that it returns gives a function, called with the values and every row of a
            trial.
        stop: called after every round; True ends the search with `RunInterrupted`.
        on_wait: called when all remaining trials are running in other processes.
    """

    jobs: int = 1
    ranks: Ranks | None = None
    progress: Progress = lambda left: nullcontext(lambda point, row: None)
    stop: Callable[[], bool] = lambda: False
    on_wait: Callable[[], None] = lambda: None

    def agree(self, value: Any) -> Any:
        """Return the first rank's value on all ranks: the study may change between two reads."""
        return value if self.ranks is None else self.ranks.broadcast(value)

    def run(self, left: int, search: Callable[[OnRow], Search], executor: Executor) -> None:
        """Run the `left` trials of a search, which is made from the function that `progress` gives.

        That updates were not finite shows in the scores, and is not warned of.
        """
        with self.progress(runs_per_rank(left, self.ranks)) as on_row, warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteUpdateWarning)
            queue = search(on_row)
            run_queue(
                queue,
                left,
                self.jobs,
                TRIALS,
                ranks=self.ranks,
                stop=self.stop,
                on_wait=self.on_wait,
                references=queue.references,
                executor=executor,
            )


def tune(study: Study, runner: TrialRunner = TrialRunner()) -> list[Trial]:  # noqa: B008 (frozen)
    """Run the remaining trials of a study; return all its trials, best first.

    Any number of processes can tune a study at a time: each takes trials that no other has, and all
    return when the last trial has finished.
    """
    kind = FreeSearch if study.protocol == "free" else GridSearch
    runner = replace(runner, jobs=jobs_for([study.run.spec], runner.jobs))
    with study.open() as store:
        left: int = runner.agree(study.size - len(store.trials()))
        if left > 0:
            with closing(Executor(TRIALS, study.run)) as executor:
                runner.run(left, lambda on_row: kind(study, store, on_row), executor)
        return ranked(study, store.trials())


def ranked(study: Study, trials: list[Trial]) -> list[Trial]:
    """Return the trials, best first; equal ones in the order of the grid."""
    order = points(study.values) if study.protocol != "free" else [each.point for each in trials]
    sign = -1 if study.goal.higher else 1
    return sorted(
        trials,
        key=lambda each: (
            each.result.pruned or each.result.diverged_at is not None,
            sign * each.result.score,
            order.index(each.point),
        ),
    )


def check_study(study: Study) -> None:
    """Raise `UsageError` for values that no trial can have, before any runs."""
    corners = points({name: (values[0], values[-1]) for name, values in study.values.items()})
    for corner in corners:
        study.spec_at(corner).prepare(study.run.task)
    study.run.records()
    require(study.size >= 1, f"a search needs at least one trial, not {study.size}")


@dataclass(frozen=True)
class EpsilonResult:
    """The eps that the rule of thumb chose.

    Attributes:
        chosen: last value before the drop.
        tried: every value up to the end of the search, with its result.
        ended: "drop", "average" if every step size was 1, or "edge" after the last value.
    """

    chosen: float
    tried: list[tuple[float, TrialResult]]
    ended: Literal["drop", "average", "edge"]


def tune_epsilon(
    study: Study,
    runner: TrialRunner = TrialRunner(),  # noqa: B008 (frozen)
) -> EpsilonResult:
    """Apply the rule of thumb; trials that the study holds already are not run again."""
    at_a_time, ranks = runner.jobs, runner.ranks
    if ranks is not None:  # more ranks than values share the clients of one trial after another
        at_a_time = ranks.world_size if ranks.world_size <= len(EPS_VALUES) else 1
    with closing(Executor(TRIALS, study.run)) as executor, study.open() as store:

        def evaluate(values: Sequence[float]) -> list[TrialResult]:
            known = [each.point for each in store.trials()]
            wanted: list[Point] = [{EPS: value} for value in values]
            left: list[Point] = runner.agree([point for point in wanted if point not in known])
            if left:
                search = partial(GridSearch, study, store, only=left)
                runner.run(len(left), search, executor)
            results = {each.point[EPS]: each.result for each in store.trials()}
            return [results[value] for value in values]

        return raise_until_drop(evaluate, study.goal.higher, at_a_time)


def raise_until_drop(
    evaluate: Callable[[Sequence[float]], list[TrialResult]], higher: bool, at_a_time: int = 1
) -> EpsilonResult:
    """Raise eps until the score drops (App. D.4, docs/paper.md#epsilon-rule-of-thumb).

    The search also ends where every server step size is 1, because a larger eps changes nothing
    from there on, and at 10.

    Args:
        evaluate: returns the results of some values.
        higher: whether larger scores are better.
        at_a_time: number of values to evaluate at a time.

    >>> scores = {1e-3: 0.7, 10**-2.5: 0.8, 1e-2: 0.75}
    >>> found = raise_until_drop(lambda values: [TrialResult(scores[v]) for v in values], True)
    >>> round(found.chosen, 5), found.ended, len(found.tried)
    (0.00316, 'drop', 3)
    """
    tried: list[tuple[float, TrialResult]] = []
    for first in range(0, len(EPS_VALUES), at_a_time):
        batch = EPS_VALUES[first : first + at_a_time]
        for value, result in zip(batch, evaluate(batch), strict=True):
            tried.append((value, result))
            if len(tried) > 1:
                before, last = tried[-2][1].score, result.score
                if last < before if higher else last > before:
                    return EpsilonResult(tried[-2][0], tried, "drop")
            if result.averages:
                return EpsilonResult(value, tried, "average")
    return EpsilonResult(EPS_VALUES[-1], tried, "edge")


def epsilon_values(run: Run) -> Values:
    """Return the values that the rule tries; raise `UsageError` if the algorithm has no eps."""
    require(
        EPS in run.setup.options(),
        f"{run.spec.algorithm} has no eps; choose an algorithm that extrapolates, e.g. fedexp",
    )
    return {EPS: EPS_VALUES}


def explain(found: EpsilonResult, study: Study) -> str:
    """Return one line: what was chosen, and why the search ended."""
    first, last = window_of(study.run.rounds)
    what = f"{study.metric.replace('train_', 'training ')} (mean of rounds {first} to {last})"
    value = {eps: format_value(result.score, study.metric) for eps, result in found.tried}
    head = f"eps {found.chosen:.3g}: {what} is {value[found.chosen]}"
    end, result = found.tried[-1]
    if found.ended == "average":
        return f"{head}, and every step size is 1 from here on: larger eps is FedAvg as well"
    if found.ended == "edge":
        return f"{head} and has not dropped up to here, the largest value tried"
    low = " (smaller values are not part of the rule)" if found.chosen == EPS_VALUES[0] else ""
    verb = "drops" if study.goal.higher else "rises"
    fell = "diverges" if result.diverged_at is not None else f"{verb} to {value[end]}"
    return f"{head} and {fell} at {end:.3g}{low}"


class _Running(NamedTuple):
    """A trial that runs: its number or Optuna trial, its values, and the rows so far."""

    id: Any
    point: Point
    rows: list[Row]


class Search(ABC):
    """A queue of trials; see `RunQueue`."""

    def __init__(self, study: Study, store: StudyStore, on_row: OnRow) -> None:
        self._study, self._store, self._on_row = study, store, on_row
        self.references = study.run.spec.references

    @abstractmethod
    def take(self) -> Job | None: ...

    @abstractmethod
    def is_done(self) -> bool: ...

    def on_round(self, job: Job, row: Row) -> bool:
        running: _Running = job.key
        running.rows.append(row)
        self._on_row(running.point, row)
        return not self._is_behind(running, row)

    def on_result(self, job: Job, result: Result) -> None:
        running: _Running = job.key
        diverged_at = result.diverged_at if isinstance(result, Outcome) else None
        found = result_of(running.rows, self._study.goal, diverged_at, result == "stopped")
        self._store_result(running, found)

    def _job(self, id: Any, point: Point) -> Job:
        return Job(_Running(id, point, []), self._study.spec_at(point))

    def _is_behind(self, running: _Running, row: Row) -> bool:
        """Return whether to prune a trial after a round."""
        return False

    @abstractmethod
    def _store_result(self, running: _Running, result: TrialResult) -> None: ...


class GridSearch(Search):
    """The points of a grid that the study does not hold yet, or only some of them."""

    def __init__(
        self, study: Study, store: StudyStore, on_row: OnRow, only: Sequence[Point] | None = None
    ) -> None:
        super().__init__(study, store, on_row)
        numbered = enumerate(points(study.values))
        self._points = [(k, point) for k, point in numbered if only is None or point in only]

    def take(self) -> Job | None:
        with self._store.locked():
            for number, point in self._left():
                if self._store.acquire(number):
                    return self._job(number, point)
        return None

    def is_done(self) -> bool:
        return not self._left()

    def _left(self) -> list[tuple[int, Point]]:
        known = [each.point for each in self._store.trials()]
        return [(number, point) for number, point in self._points if point not in known]

    def _store_result(self, running: _Running, result: TrialResult) -> None:
        self._store.add(running.id, running.point, result)


class FreeSearch(Search):
    """Optuna's TPE over ranges; trials worse than the median of the others are pruned."""

    def take(self) -> Job | None:
        with self._store.locked():
            if self._store.count_started() >= self._study.trials:
                return None
            return self._job(*self._store.ask(self._first_point()))

    def is_done(self) -> bool:
        return len(self._store.trials()) >= self._study.trials

    def _first_point(self) -> Point:
        """Return the task's own values, as far as they are in the ranges."""
        known = self._study.run.setup.options()
        return {
            name: float(known[name])
            for name, (low, high) in self._study.values.items()
            if low <= known[name] <= high
        }

    def _is_behind(self, running: _Running, row: Row) -> bool:
        value = row.get(self._study.metric)
        return value is not None and self._store.should_prune(running.id, value, row["round"])

    def _store_result(self, running: _Running, result: TrialResult) -> None:
        self._store.tell(running.id, result)


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


def result_of(
    rows: Sequence[Row], goal: Goal, diverged_at: int | None = None, pruned: bool = False
) -> TrialResult:
    """Return the result of a trial with these rows."""
    score = math.nan if pruned or diverged_at is not None else score_of(rows, goal.metric)
    steps = [row["server_lr"] for row in rows if row["server_lr"] is not None]
    last = rows[-1] if rows else {}
    return TrialResult(
        worst_score(goal) if math.isnan(score) else score,
        diverged_at,
        pruned,
        test=last.get(goal.metric.replace("train_", "test_")),
        step=median(steps) if steps else None,
        averages=bool(steps) and all(step == 1 for step in steps),
    )


class TrialRun(Run):
    """A run that is evaluated a few times, and then in every round of the window."""

    def records(
        self,
        start: SimulationState | None = None,
        client_store: ClientStore | None = None,
        process_group: ProcessGroup | None = None,
        programs: SharedPrograms | None = None,
    ) -> Iterator[Record]:
        early = window_of(self.rounds)[0] - 1
        if (0 if start is None else start.round) < early:
            sparse = replace(self.spec, evaluate_every=max(1, early // EARLY_EVALUATIONS))
            # with all rounds, on which schedules and the noise of privacy depend
            before = replace(self, spec=sparse)
            for record in Run.records(before, start, client_store, process_group, programs):
                yield record
                start = record.state
                if record.round == early:
                    break
        window = replace(self, spec=replace(self.spec, evaluate_every=1))
        yield from Run.records(window, start, client_store, process_group, programs)


def prepare_trial(spec: Spec, task: Task | None = None) -> TrialRun:
    """Return the run of a trial; `task` is the spec's own if it has been built before."""
    run = spec.prepare(task)
    return TrialRun(**{each.name: getattr(run, each.name) for each in fields(run)})


TRIALS = Execution(prepare_trial)
