"""The rule of thumb for eps: from 1e-3 up, in half decades, until the result drops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedexp.errors import UsageError
from fedexp.runs.spec import Spec
from fedexp.tune.epsilon import (
    EPS,
    VALUES,
    epsilon_values,
    explain,
    raise_until_drop,
    tune_epsilon,
)
from fedexp.tune.search import OnRow, Study, TrialRunner
from fedexp.tune.trial import TrialResult
from tests.helpers.tuning import small_study


class Fake:
    """Scores by the position of a value; records the values that it was called with."""

    def __init__(self, scores: Sequence[float], averages_from: int = 99) -> None:
        self.values: list[float] = []
        self._scores, self._averages = scores, averages_from

    def __call__(self, values: Sequence[float]) -> list[TrialResult]:
        self.values += values
        positions = [VALUES.index(value) for value in values]
        return [TrialResult(self._scores[k], averages=k >= self._averages) for k in positions]


def test_values_start_at_a_thousandth_and_rise_by_half_decades() -> None:
    assert VALUES[:3] == (1e-3, 10**-2.5, 1e-2)
    assert VALUES[-1] == 10


@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_it_stops_at_the_first_drop(at_a_time: int) -> None:
    fake = Fake([0.5, 0.6, 0.6, 0.7, 0.65, 0.9, 0.9, 0.9, 0.9])
    found = raise_until_drop(fake, higher=True, at_a_time=at_a_time)
    assert (found.chosen, found.ended) == (VALUES[3], "drop")
    assert [eps for eps, _ in found.tried] == list(VALUES[:5])
    assert len(fake.values) < 5 + at_a_time


def test_a_loss_drops_if_it_rises() -> None:
    found = raise_until_drop(Fake([3.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), higher=False)
    assert (found.chosen, found.ended) == (VALUES[1], "drop")


def test_it_stops_where_a_larger_eps_changes_nothing() -> None:
    found = raise_until_drop(Fake([0.5] * 9, averages_from=4), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (VALUES[4], "average", 5)


def test_it_stops_at_the_edge() -> None:
    found = raise_until_drop(Fake([k / 10 for k in range(9)]), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (10, "edge", 9)


def test_a_value_that_diverges_is_not_chosen() -> None:
    """A trial that diverged has the worst score, so that the next value is no drop."""
    fake = Fake([0.0, 0.8, 0.7, 0, 0, 0, 0, 0, 0])
    assert raise_until_drop(fake, higher=True).chosen == VALUES[1]


@pytest.mark.parametrize(
    ("scores", "averages", "end"),
    [
        ([0.5, 0.6, 0.55], 99, "is 60.00% and drops to 55.00% at 0.01"),
        ([0.6, 0.5], 99, "drops to 50.00% at 0.00316 (smaller values are not part of the rule)"),
        ([0.6], 0, "every step size is 1 from here on: larger eps is FedAvg as well"),
        ([0.6] * 9, 99, "has not dropped up to here, the largest value tried"),
    ],
)
def test_the_result_in_one_line(
    scores: list[float], averages: int, end: str, tmp_path: Path
) -> None:
    found = raise_until_drop(Fake(scores, averages), higher=True)
    run = Spec("digits", "fedexp", rounds=50).prepare()
    line = explain(found, Study(run, "epsilon", {EPS: VALUES}, tmp_path / "s.db"))
    assert line.startswith(f"eps {found.chosen:.3g}: training accuracy (mean of rounds 41 to 50)")
    assert line.endswith(end)
    assert "\n" not in line


def test_on_real_digits(tmp_path: Path) -> None:
    """It ends with a drop or an average, and runs no trial twice."""
    run = Spec("digits", "fedexp", rounds=12).prepare()
    study = Study(run, "epsilon", {EPS: VALUES}, tmp_path / "s.db")
    found = tune_epsilon(study)
    scores = [result.score for _, result in found.tried]
    place = [eps for eps, _ in found.tried].index(found.chosen)
    assert scores[: place + 1] == sorted(scores[: place + 1])
    assert found.ended in ("drop", "average")
    assert found.tried[-1][1].score < scores[place] or found.ended == "average"
    steps = [result.step for _, result in found.tried]
    assert steps[-1] is not None
    assert steps[0] is not None
    assert steps[-1] < steps[0]  # a larger eps lowers the step size
    assert tune_epsilon(study, TrialRunner(progress=_not_called)) == found


def test_only_algorithms_that_extrapolate_have_an_eps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fedavg has no eps"):
        epsilon_values(small_study(tmp_path / "s.db", "fedavg").run)


def _not_called(left: int) -> AbstractContextManager[OnRow]:
    raise AssertionError("all values were stored already")
