"""Searches: the paper's grid, point by point, and a free one that learns and prunes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedexp.errors import require
from fedexp.experiments.spec import Run, Spec, is_better_higher
from fedexp.studies.grids import Point, Values, points
from fedexp.studies.ledger import Ledger, Tried, open_ledger
from fedexp.studies.trial import WINDOW, Row, Scored, metric_of
from fedexp.studies.workers import run_trials

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
) -> list[Tried]:
    """Run what is left of a study; all its trials, the best first.

    Args:
        study: what to tune.
        jobs: trials at a time, each in a process of its own where there are several.
        watching: told how many trials are left; what it gives hears of every round of each.
    """
    kind = FreeSearch if study.protocol == "free" else GridSearch
    with study.opened() as ledger:
        before = ledger.tried()
        left = study.size - len(before)
        if left > 0:
            with watching(left) as on_row:
                run_trials(kind(study, ledger, before, on_row), min(jobs, left))
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
    """Every point of the grid that has not been tried."""

    def __init__(self, study: Study, ledger: Ledger, before: list[Tried], on_row: OnRow) -> None:
        known = [each.point for each in before]
        self._left = [point for point in points(study.values) if point not in known]
        self._study, self._ledger, self._on_row = study, ledger, on_row

    def take(self) -> tuple[Point, Spec] | None:
        if not self._left:
            return None
        point = self._left.pop(0)
        return point, self._study.spec_at(point)

    def go_on(self, key: Point, row: Row) -> bool:
        self._on_row(key, row)
        return True

    def done(self, key: Point, scored: Scored) -> None:
        self._ledger.add(key, scored)


class FreeSearch:
    """Optuna's TPE over ranges; what falls behind the median of the others is given up."""

    def __init__(self, study: Study, ledger: Ledger, before: list[Tried], on_row: OnRow) -> None:
        self._study, self._ledger, self._on_row = study, ledger, on_row
        self._left = study.trials - len(before)
        ledger.again()
        ledger.suggest(_start(study))

    def take(self) -> tuple[Any, Spec] | None:
        if self._left <= 0:
            return None
        self._left -= 1
        trial, point = self._ledger.ask()
        return (trial, point), self._study.spec_at(point)

    def go_on(self, key: Any, row: Row) -> bool:
        trial, point = key
        self._on_row(point, row)
        value = row.get(self._study.metric)
        if value is None:
            return True
        trial.report(value, row["round"])
        return not trial.should_prune()

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
