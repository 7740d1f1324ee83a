"""The paper's rule of thumb for eps: start at 1e-3 and raise it until the result drops (App. D.3).

Steps are half decades, as in the paper's grid. Besides a drop the search ends where raising eps
further changes nothing, because every server step size is 1 already, and at 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedexp.analysis.tables import format_value
from fedexp.distributed import Ranks
from fedexp.errors import require
from fedexp.runs.pool import told_of
from fedexp.runs.spec import Run, is_better_higher
from fedexp.tune.grids import Point, Values, powers
from fedexp.tune.ledger import Ledger
from fedexp.tune.search import GridSearch, Study, Watching, unwatched
from fedexp.tune.trial import Pause, Scored, run_left, wait_a_moment, window_of

EPS = "server.eps"
VALUES = powers([-3 + step / 2 for step in range(9)])

Scorer = Callable[[Sequence[float]], list[Scored]]


@dataclass(frozen=True)
class Found:
    """What the rule came to.

    Attributes:
        chosen: the last value before the drop.
        tried: every value up to the end of the search, with its score.
        ended: "drop", "average" where every step size was 1, or "edge" after the last value.
    """

    chosen: float
    tried: list[tuple[float, Scored]]
    ended: Literal["drop", "average", "edge"]


def climb(scores: Scorer, higher: bool, ahead: int = 1) -> Found:
    """Raise eps until the score drops.

    Args:
        scores: the scores of some values.
        higher: whether larger scores are better.
        ahead: how many values to score at a time.

    >>> made_up = {1e-3: 0.7, 10**-2.5: 0.8, 1e-2: 0.75}
    >>> found = climb(lambda values: [Scored(made_up[value]) for value in values], higher=True)
    >>> round(found.chosen, 5), found.ended, len(found.tried)
    (0.00316, 'drop', 3)
    """
    tried: list[tuple[float, Scored]] = []
    for first in range(0, len(VALUES), ahead):
        batch = VALUES[first : first + ahead]
        for value, scored in zip(batch, scores(batch), strict=True):
            before = tried[-1] if tried else None
            tried.append((value, scored))
            if before and _drops(before[1].score, scored.score, higher):
                return Found(before[0], tried, "drop")
            if scored.averages:
                return Found(value, tried, "average")
    return Found(VALUES[-1], tried, "edge")


def epsilon_values(run: Run) -> Values:
    """What the rule goes through, for an algorithm that has an eps."""
    name = run.spec.algorithm
    require(
        EPS in run.setup.options(),
        f"{name} has no eps; choose an algorithm that extrapolates, e.g. fedexp",
    )
    return {EPS: VALUES}


def tune_epsilon(
    study: Study,
    jobs: int = 1,
    watching: Watching = unwatched,
    pause: Pause = wait_a_moment,
    ranks: Ranks | None = None,
) -> Found:
    """Follow the rule on a task; values that the study holds already are not run again.

    The arguments are those of `tune`.
    """
    with study.opened() as ledger:

        def scores(values: Sequence[float]) -> list[Scored]:
            wanted: list[Point] = [{EPS: value} for value in values]
            left = [point for point in wanted if point not in _points(ledger)]
            left = left if ranks is None else ranks.broadcast(left)
            if left:
                with watching(told_of(len(left), ranks)) as on_row:
                    search = GridSearch(study, ledger, on_row, only=left)
                    run_left(search, len(left), jobs, pause, ranks)
            known = {each.point[EPS]: each.scored for each in ledger.tried()}
            return [known[value] for value in values]

        return climb(scores, is_better_higher(study.metric), _ahead(jobs, ranks))


def _ahead(jobs: int, ranks: Ranks | None) -> int:
    """How many values to try at a time; more ranks than values share one after another."""
    if ranks is None:
        return jobs
    return ranks.world_size if ranks.world_size <= len(VALUES) else 1


def explain(found: Found, study: Study) -> str:
    """What was found, in one line."""
    first, last = window_of(study.run.rounds)
    what = f"{study.metric.replace('train_', 'training ')} (mean of rounds {first} to {last})"
    value = {eps: format_value(scored.score, study.metric) for eps, scored in found.tried}
    head = f"eps {found.chosen:.3g}: {what} is {value[found.chosen]}"
    end, scored = found.tried[-1]
    if found.ended == "average":
        return f"{head}, and every step size is 1 from here on: larger eps is FedAvg as well"
    if found.ended == "edge":
        return f"{head} and has not dropped up to here, the largest value tried"
    low = " (smaller values are not part of the rule)" if found.chosen == VALUES[0] else ""
    verb = "drops" if is_better_higher(study.metric) else "rises"
    fell = "diverges" if scored.diverged_at is not None else f"{verb} to {value[end]}"
    return f"{head} and {fell} at {end:.3g}{low}"


def _drops(before: float, now: float, higher: bool) -> bool:
    return now < before if higher else now > before


def _points(ledger: Ledger) -> list[Point]:
    return [each.point for each in ledger.tried()]
