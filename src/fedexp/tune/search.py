"""Searches: which trials of a study to run. A grid, point by point, or Optuna's TPE with pruning.

A search is a queue of runs (`fedexp.runs.pool.RunQueue`): the pool executes its trials in this
process, in worker processes or over ranks, and the search alone reads and writes the study.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedexp.distributed import Ranks
from fedexp.errors import NonFiniteUpdateWarning, require
from fedexp.runs.files import Row
from fedexp.runs.pool import Execution, Job, Result, jobs_for, run_queue, runs_per_rank
from fedexp.runs.spec import Outcome, Run, Spec, is_better_higher
from fedexp.tune.grids import Point, Values, points
from fedexp.tune.store import FINGERPRINT, StudyStore, Trial, open_study
from fedexp.tune.trial import WINDOW, TrialResult, metric_of, prepare_trial, result_of

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
    def metric(self) -> str:
        return metric_of(self.run.task)

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
        described.pop("evaluate_every")  # trials have their own
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
        higher = is_better_higher(self.metric)
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

    def run(self, left: int, search: Callable[[OnRow], Search]) -> None:
        """Run the `left` trials of a search, which is made from the function that `progress` gives.

        That updates were not finite shows in the scores, and is not warned of.
        """
        with self.progress(runs_per_rank(left, self.ranks)) as on_row, warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteUpdateWarning)
            run_queue(
                search(on_row),
                left,
                self.jobs,
                Execution(prepare_trial),
                ranks=self.ranks,
                stop=self.stop,
                on_wait=self.on_wait,
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
            runner.run(left, lambda on_row: kind(study, store, on_row))
        return ranked(study, store.trials())


def ranked(study: Study, trials: list[Trial]) -> list[Trial]:
    """Return the trials, best first; equal ones in the order of the grid."""
    order = points(study.values) if study.protocol != "free" else [each.point for each in trials]
    sign = -1 if is_better_higher(study.metric) else 1
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
    require(study.size >= 1, "a search needs at least one trial; see --trials")


class _Running(NamedTuple):
    """A trial that runs: its number or Optuna trial, its values, and the rows so far."""

    id: Any
    point: Point
    rows: list[Row]


class Search(ABC):
    """A queue of trials; see `RunQueue`."""

    def __init__(self, study: Study, store: StudyStore, on_row: OnRow) -> None:
        self._study, self._store, self._on_row = study, store, on_row

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
        found = result_of(running.rows, self._study.metric, diverged_at, result == "stopped")
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
