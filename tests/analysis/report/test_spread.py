"""Mean and spread over seeds: unequal lengths, windows, and edges that a log axis can show."""

from __future__ import annotations

import numpy as np
import pytest

from fedexp.analysis.plots import mean_and_spread
from fedexp.analysis.report.sections import spans_decades, spread


def test_a_seed_that_ended_leaves_the_mean_to_the_others() -> None:
    pooled = spread([np.array([1.0, 2.0]), np.array([3.0, 6.0, 7.0, 9.0])])
    assert pooled.rounds.tolist() == [1, 2, 3, 4]
    assert pooled.mean.tolist() == [2, 4, 7, 9]
    assert pooled.std.tolist() == pytest.approx([2**0.5, 8**0.5, 0, 0])
    assert pooled.seeds.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("window", [1, 5, 20])
def test_equal_lengths_agree_with_the_comparison_figure(window: int) -> None:
    rng = np.random.default_rng(0)
    curves = list(rng.normal(5, 1, (3, 40)))
    for curve in curves:
        curve[1::2] = np.nan
    pooled = spread(curves, window)
    rounds, mean, std = mean_and_spread(curves, window)
    np.testing.assert_array_equal(pooled.rounds, rounds)
    np.testing.assert_array_equal(pooled.mean, mean)
    np.testing.assert_array_equal(pooled.std, std)


def test_a_window_forgets_a_seed_that_has_ended() -> None:
    pooled = spread([np.array([100.0, 100.0]), np.array([1.0, 1.0, 3.0])], window=3)
    assert pooled.mean[-1] == pytest.approx(5 / 3)


def test_the_band_of_positive_numbers_stays_positive() -> None:
    pooled = spread([np.array([1e-6, 1.0]), np.array([1.0, 2.0])])
    assert pooled.low.tolist() == [1e-6, pytest.approx(1.5 - 0.5**0.5)]
    below = spread([np.array([-1.0]), np.array([1.0])])
    assert below.low[0] == pytest.approx(-(2**0.5))


def test_the_band_of_accuracies_ends_at_one() -> None:
    pooled = spread([np.array([0.8]), np.array([1.0])], top=1.0)
    assert pooled.high.tolist() == [1.0]


def test_nothing_at_all_is_drawn_as_nothing() -> None:
    assert spread([]).rounds.size == 0
    assert spread([np.empty(0), np.array([np.nan])]).rounds.size == 0


def test_a_log_axis_needs_positive_numbers_far_apart() -> None:
    assert spans_decades([np.array([1.0]), np.array([np.nan, 1e-3])])
    assert not spans_decades([np.array([1.0, 0.0])])
    assert not spans_decades([np.array([1.0, 0.1])])
