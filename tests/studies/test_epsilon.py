"""The rule of thumb for eps: from 1e-3 up, in half decades, until the result drops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedexp.errors import UsageError
from fedexp.runs.spec import Spec
from fedexp.tune.epsilon import EPS, VALUES, climb, epsilon_values, explain, tune_epsilon
from fedexp.tune.search import OnRow, Study
from fedexp.tune.trial import Scored
from tests.studies.problems import small_study


class Fake:
    """Scores by the place of a value, and remembers what it was asked."""

    def __init__(self, scores: Sequence[float], averages_from: int = 99) -> None:
        self.asked: list[float] = []
        self._scores, self._averages = scores, averages_from

    def __call__(self, values: Sequence[float]) -> list[Scored]:
        self.asked += values
        places = [VALUES.index(value) for value in values]
        return [Scored(self._scores[k], averages=k >= self._averages) for k in places]


def test_values_begin_at_a_thousandth_and_rise_by_half_decades() -> None:
    assert VALUES[:3] == (1e-3, 10**-2.5, 1e-2)
    assert VALUES[-1] == 10


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_it_stops_at_the_first_drop(ahead: int) -> None:
    fake = Fake([0.5, 0.6, 0.6, 0.7, 0.65, 0.9, 0.9, 0.9, 0.9])
    found = climb(fake, higher=True, ahead=ahead)
    assert (found.chosen, found.ended) == (VALUES[3], "drop")
    assert [eps for eps, _ in found.tried] == list(VALUES[:5])
    assert len(fake.asked) < 5 + ahead  # a few ahead, no more


def test_losses_drop_by_rising() -> None:
    found = climb(Fake([3.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), higher=False)
    assert (found.chosen, found.ended) == (VALUES[1], "drop")


def test_it_stops_where_more_eps_changes_nothing() -> None:
    found = climb(Fake([0.5] * 9, averages_from=4), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (VALUES[4], "average", 5)


def test_it_stops_at_the_edge() -> None:
    found = climb(Fake([k / 10 for k in range(9)]), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (10, "edge", 9)


def test_a_value_too_small_to_hold_the_step_is_left_behind() -> None:
    """eps is there against blow-up: what diverges has the worst score, and no drop follows it."""
    assert climb(Fake([0.0, 0.8, 0.7, 0, 0, 0, 0, 0, 0]), higher=True).chosen == VALUES[1]


@pytest.mark.parametrize(
    ("scores", "averages", "end"),
    [
        ([0.5, 0.6, 0.55], 99, "is 60.00% and drops to 55.00% at 0.01"),
        ([0.6, 0.5], 99, "drops to 50.00% at 0.00316 (smaller values are not part of the rule)"),
        ([0.6], 0, "every step size is 1 from here on: larger eps is FedAvg as well"),
        ([0.6] * 9, 99, "has not dropped up to here, the largest value tried"),
    ],
)
def test_what_it_found_in_one_line(
    scores: list[float], averages: int, end: str, tmp_path: Path
) -> None:
    found = climb(Fake(scores, averages), higher=True)
    run = Spec("digits", "fedexp", rounds=50).prepare()
    line = explain(found, Study(run, "epsilon", {EPS: VALUES}, tmp_path / "s.db"))
    assert line.startswith(f"eps {found.chosen:.3g}: training accuracy (mean of rounds 41 to 50)")
    assert line.endswith(end)
    assert "\n" not in line


def test_on_real_digits(tmp_path: Path) -> None:
    """It ends with a drop or an average, and takes nothing twice."""
    run = Spec("digits", "fedexp", rounds=12).prepare()
    study = Study(run, "epsilon", {EPS: VALUES}, tmp_path / "s.db")
    found = tune_epsilon(study)
    scores = [scored.score for _, scored in found.tried]
    place = [eps for eps, _ in found.tried].index(found.chosen)
    assert scores[: place + 1] == sorted(scores[: place + 1])
    assert found.ended in ("drop", "average")
    assert found.tried[-1][1].score < scores[place] or found.ended == "average"
    steps = [scored.step for _, scored in found.tried]
    assert steps[-1] is not None
    assert steps[0] is not None
    assert steps[-1] < steps[0]  # a larger eps holds the step size
    assert tune_epsilon(study, watching=_not_called) == found


def test_only_what_extrapolates_has_an_eps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fedavg has no eps"):
        epsilon_values(small_study(tmp_path / "s.db", "fedavg").run)


def _not_called(left: int) -> AbstractContextManager[OnRow]:
    raise AssertionError("all values were there already")
