"""The paper's rule of thumb for eps: start at 1e-3 and raise it until the result drops (App. D.4).

See docs/paper.md#epsilon-rule-of-thumb. Steps are half decades, as in the paper's grid. The search
also ends where every server step size is 1, because a larger eps changes nothing from there on, and
at 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedexp.analysis.tables import format_value
from fedexp.errors import require
from fedexp.runs.spec import Run, is_better_higher
from fedexp.tune.grids import Point, Values, powers
from fedexp.tune.search import GridSearch, Study, TrialRunner
from fedexp.tune.trial import TrialResult, window_of

EPS = "server.eps"
VALUES = powers([-3 + step / 2 for step in range(9)])


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


def raise_until_drop(
    evaluate: Callable[[Sequence[float]], list[TrialResult]], higher: bool, at_a_time: int = 1
) -> EpsilonResult:
    """Raise eps until the score drops.

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
    for first in range(0, len(VALUES), at_a_time):
        batch = VALUES[first : first + at_a_time]
        for value, result in zip(batch, evaluate(batch), strict=True):
            tried.append((value, result))
            if len(tried) > 1:
                before, last = tried[-2][1].score, result.score
                if last < before if higher else last > before:
                    return EpsilonResult(tried[-2][0], tried, "drop")
            if result.averages:
                return EpsilonResult(value, tried, "average")
    return EpsilonResult(VALUES[-1], tried, "edge")


def epsilon_values(run: Run) -> Values:
    """Return the values that the rule tries; raise `UsageError` if the algorithm has no eps."""
    require(
        EPS in run.setup.options(),
        f"{run.spec.algorithm} has no eps; choose an algorithm that extrapolates, e.g. fedexp",
    )
    return {EPS: VALUES}


def tune_epsilon(
    study: Study,
    runner: TrialRunner = TrialRunner(),  # noqa: B008 (frozen)
) -> EpsilonResult:
    """Apply the rule to a task; trials that the study holds already are not run again."""
    at_a_time, ranks = runner.jobs, runner.ranks
    if ranks is not None:  # more ranks than values share the clients of one trial after another
        at_a_time = ranks.world_size if ranks.world_size <= len(VALUES) else 1
    with study.open() as store:

        def evaluate(values: Sequence[float]) -> list[TrialResult]:
            known = [each.point for each in store.trials()]
            wanted: list[Point] = [{EPS: value} for value in values]
            left: list[Point] = runner.agree([point for point in wanted if point not in known])
            if left:
                runner.run(len(left), lambda on_row: GridSearch(study, store, on_row, only=left))
            results = {each.point[EPS]: each.result for each in store.trials()}
            return [results[value] for value in values]

        return raise_until_drop(evaluate, is_better_higher(study.metric), at_a_time)


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
    low = " (smaller values are not part of the rule)" if found.chosen == VALUES[0] else ""
    verb = "drops" if is_better_higher(study.metric) else "rises"
    fell = "diverges" if result.diverged_at is not None else f"{verb} to {value[end]}"
    return f"{head} and {fell} at {end:.3g}{low}"
