"""Searches: the paper's grid, point by point, and a free one that learns and prunes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedexp.distributed import Ranks
from fedexp.errors import require
from fedexp.runs.pool import told_of
from fedexp.runs.spec import Run, Spec, is_better_higher
from fedexp.tune.grids import Point, Values, points
from fedexp.tune.ledger import FINGERPRINT, Ledger, Tried, open_ledger
from fedexp.tune.trial import WINDOW, Pause, Row, Scored, metric_of, run_left, wait_a_moment

Protocol = Literal["paper", "free", "epsilon"]
OnRow = Callable[[Point, Row], None]
Watching = Callable[[int], AbstractContextManager[OnRow]]


def unwatched(left: int) -> AbstractContextManager[OnRow]:
    """Nobody hears of the rounds."""
    return nullcontext(lambda point, row: None)


@dataclass(frozen=True)
class Study:
    """What is tuned, by which protocol, and where the scores are kept.

    Attributes:
        run: what every trial is but for the options that are searched.
        protocol: "paper" for a grid, "free" for ranges, "epsilon" for the rule of thumb.
        values: of each option the values of the grid, or the two ends of the range.
        path: the SQLite file.
        trials: how many trials a free search has in all.
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
        """How many trials there are to be."""
        return self.trials if self.protocol == "free" else len(points(self.values))

    def spec_at(self, point: Point) -> Spec:
        """The spec of one trial."""
        turned = tuple((name, repr(value)) for name, value in point.items())
        return replace(self.run.spec, options=(*self.run.spec.options, *turned))

    def terms(self) -> dict[str, Any]:
        """All that decides the scores: a study goes on under the same terms only."""
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

    def opened(self) -> Any:
        """The ledger of the study, for a `with` block."""
        spec = self.run.spec
        name = f"{spec.task} {spec.algorithm} {self.protocol}"
        higher = is_better_higher(self.metric)
        return open_ledger(self.path, name, self.terms(), self.values, higher, spec.seed)


def tune(
    study: Study,
    jobs: int = 1,
    watching: Watching = unwatched,
    pause: Pause = wait_a_moment,
    ranks: Ranks | None = None,
) -> list[Tried]:
    """Run what is left of a study; all its trials, the best first.

    Any number of processes can do so at a time: each takes what no other has, and all return when
    the last trial is over.

    Args:
        study: what to tune.
        jobs: trials at a time, each in a process of its own where there are several.
        watching: told how many trials are left; what it gives hears of every round of each.
        pause: called again and again while all that is left is with other processes.
        ranks: the processes of one job that all call this, if there are several.
    """
    kind = FreeSearch if study.protocol == "free" else GridSearch
    with study.opened() as ledger:
        left = study.size - len(ledger.tried())
        left = left if ranks is None else ranks.broadcast(left)
        if left > 0:
            with watching(told_of(left, ranks)) as on_row:
                run_left(kind(study, ledger, on_row), left, jobs, pause, ranks)
        return ranked(study, ledger.tried())


def ranked(study: Study, tried: list[Tried]) -> list[Tried]:
    """The best first; equals in the order of the grid, whoever was ready first."""
    order = points(study.values) if study.protocol != "free" else [each.point for each in tried]
    sign = -1 if is_better_higher(study.metric) else 1
    return sorted(
        tried,
        key=lambda each: (
            each.scored.pruned or each.scored.diverged_at is not None,
            sign * each.scored.score,
            order.index(each.point),
        ),
    )


class GridSearch:
    """Every point of the grid that has not been tried, or only some of them."""

    def __init__(
        self, study: Study, ledger: Ledger, on_row: OnRow, only: Sequence[Point] | None = None
    ) -> None:
        self._study, self._ledger, self._on_row = study, ledger, on_row
        every = enumerate(points(study.values))
        self._points = [(k, point) for k, point in every if only is None or point in only]

    def take(self) -> tuple[Any, Spec] | None:
        with self._ledger.held():
            for number, point in self._left():
                if self._ledger.claim(number):
                    return (number, point), self._study.spec_at(point)
        return None

    def over(self) -> bool:
        return not self._left()

    def go_on(self, key: Any, row: Row) -> bool:
        self._on_row(key[1], row)
        return True

    def done(self, key: Any, scored: Scored) -> None:
        number, point = key
        self._ledger.add(number, point, scored)

    def _left(self) -> list[tuple[int, Point]]:
        known = [each.point for each in self._ledger.tried()]
        return [(number, point) for number, point in self._points if point not in known]


class FreeSearch:
    """Optuna's TPE over ranges; what falls behind the median of the others is given up."""

    def __init__(self, study: Study, ledger: Ledger, on_row: OnRow) -> None:
        self._study, self._ledger, self._on_row = study, ledger, on_row

    def take(self) -> tuple[Any, Spec] | None:
        with self._ledger.held():
            if self._ledger.begun() >= self._study.trials:
                return None
            trial, point = self._ledger.ask(_start(self._study))
        return (trial, point), self._study.spec_at(point)

    def over(self) -> bool:
        return len(self._ledger.tried()) >= self._study.trials

    def go_on(self, key: Any, row: Row) -> bool:
        trial, point = key
        self._on_row(point, row)
        value = row.get(self._study.metric)
        return value is None or not self._ledger.is_behind(trial, value, row["round"])

    def done(self, key: Any, scored: Scored) -> None:
        self._ledger.tell(key[0], scored)


def _start(study: Study) -> Point:
    """The values that the task comes with, as far as they lie in the ranges."""
    known: Mapping[str, Any] = study.run.setup.options()
    return {
        name: float(known[name])
        for name, (low, high) in study.values.items()
        if low <= known[name] <= high
    }


def check_study(study: Study) -> None:
    """Find what a trial cannot be before any runs: every value is tried on the spec."""
    corners = points({name: (values[0], values[-1]) for name, values in study.values.items()})
    for corner in corners:
        study.spec_at(corner).prepare(study.run.task)
    study.run.records()
    require(study.size >= 1, "a search needs at least one trial; see --trials")
