"""Statistics over seeds: rounds to a target, speed-up, final values, and pooled curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedexp.analysis.summary import (
    is_logarithmic,
    metric_band,
    pool_seeds,
    rounds_to,
    shown_range,
    spans_decades,
    summarise,
)
from fedexp.experiment import Experiment
from fedexp.runs.spec import Outcome
from tests.helpers.outcomes import outcome


def test_a_target_is_reached_to_within_rounding() -> None:
    live, archived = sum([0.09] * 8), 0.72
    assert live < archived
    for value in (live, archived):
        assert rounds_to(np.array([0.5, value]), 0.72, higher=True) == 2
    assert rounds_to(np.array([0.5, 0.7199]), 0.72, higher=True) is None
    assert rounds_to(np.array([1.0, 3e-12, 1e-12]), 1e-12, higher=False) == 3
    stopping = Experiment("digits", "fedexp", stop_at=0.72)
    assert stopping.reached({"test_accuracy": live})
    assert not stopping.reached({"test_accuracy": 0.7199})


def test_fedavg_counts_with_its_own_rounds() -> None:
    runs = [outcome("fedavg", 0, [0.1] * 10), outcome("fedexp", 0, [0.6] * 5 + [0.7] * 15)]
    _, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert (fedexp.speedup, fedexp.at_least) == (10.0, True)  # of rounds 11 to 20 nothing is known


def test_smoothing_averages_the_end_over_rounds_and_leaves_the_rounds_to_target() -> None:
    runs = [
        outcome("fedexp", 0, [0.9] * 5 + [0.1, 0.9, 0.5, 0.7]),
        outcome("fedexp", 1, [0.1] + [0.9] * 5 + [0.2, 0.9, 0.6]),
    ]
    (line,) = summarise(runs, "test_accuracy", 0.8, smooth=2)
    assert line.rounds == [1, 6]  # five evaluations, whatever the window of the final value
    assert line.finals == pytest.approx([0.6, 0.75])
    assert line.spread == pytest.approx(np.std([0.5, 0.7, 0.9, 0.6], ddof=1))
    (one,) = summarise(runs[:1], "test_accuracy", 0.8)
    assert (one.finals, one.spread) == ([0.7], None)


def test_a_smoothed_crossing_ignores_a_lucky_evaluation() -> None:
    lucky = [0.1, None, 0.9, None, 0.5, 0.5, 0.5, 0.8, 0.8, 0.8, 0.8, 0.8]
    (line,) = summarise([outcome("fedexp", 0, lucky)], "test_accuracy", 0.79)
    assert line.rounds == [12]  # the mean of the last five evaluations, not rounds
    unlucky = [*lucky[:11], 0.5]
    (both,) = summarise(
        [outcome("fedexp", 0, lucky), outcome("fedexp", 1, unlucky)], "test_accuracy", 0.79
    )
    assert (both.rounds, both.reached, both.mean_rounds, both.missed) == ([12], [0], None, [12])


def test_before_the_fifth_evaluation_the_mean_of_all_of_them_counts() -> None:
    accuracies = (0.5, 0.6, 0.9, 0.9)  # evaluate_every=25; means 0.5, 0.55, 0.667, 0.725
    curve = [value for accuracy in accuracies for value in [*[None] * 24, accuracy]]
    (line,) = summarise([outcome("fedexp", 0, curve)], "test_accuracy", 0.65)
    assert (line.rounds, line.missed) == ([75], [])


def test_a_run_that_ended_at_its_target_has_reached_it() -> None:
    curve: list[float | None] = [0.1, 0.2, None, 0.7]
    ended = replace(outcome("fedexp", 0, curve), status="target")
    (line,) = summarise([ended], "test_accuracy", 0.7)
    assert (line.rounds, line.missed) == ([4], [])
    (line,) = summarise([outcome("fedexp", 0, curve)], "test_accuracy", 0.7)
    assert (line.rounds, line.missed) == ([], [4])
    (line,) = summarise([ended], "test_accuracy", 0.8)
    assert line.rounds == []


def test_smoothing_counts_rounds_not_evaluations() -> None:
    rare = outcome("fedexp", 0, [0.1, None, 0.4, None, 0.8])
    assert summarise([rare], "test_accuracy", None, smooth=3)[0].finals == pytest.approx([0.6])
    assert summarise([rare], "test_accuracy", None, smooth=20)[0].finals == pytest.approx([1.3 / 3])


def test_a_diverged_run_has_no_final_value() -> None:
    (line,) = summarise([outcome("fedavg", 0, [0.9], diverged_at=2)], "test_accuracy", 0.95)
    assert np.isnan(line.finals).all()


def test_losses_are_reached_from_above() -> None:
    run = outcome("fedavg", 0, [1, *[0.1] * 5], metric="train_loss")
    (line,) = summarise([run], "train_loss", 0.1)
    assert line.rounds == [6]


def test_curves_are_pooled_over_seeds_and_the_window() -> None:
    curves = [np.array([1.0, 2.0, 6.0]), np.array([3.0, 4.0, 8.0])]
    band = metric_band("train_loss", curves, 2)
    assert band.rounds.tolist() == [1, 2, 3]
    assert band.mean == pytest.approx([2, 2.5, 5])
    assert band.std[2] == pytest.approx(np.std([2, 6, 4, 8], ddof=1))
    sparse = metric_band("train_loss", [np.array([np.nan, 2.0, np.nan, 6.0])], 3)
    assert (sparse.rounds.tolist(), sparse.mean.tolist()) == ([2, 4], [2.0, 4.0])


def test_after_a_seed_has_ended_the_mean_is_over_the_rest() -> None:
    band = pool_seeds([np.array([1.0, 2.0]), np.array([3.0, 6.0, 7.0, 9.0])])
    assert band.rounds.tolist() == [1, 2, 3, 4]
    assert band.mean.tolist() == [2, 4, 7, 9]
    assert band.std.tolist() == pytest.approx([2**0.5, 8**0.5, 0, 0])
    assert band.seeds.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("window", [1, 5, 20])
def test_a_window_pools_its_evaluations_over_all_seeds(window: int) -> None:
    rng = np.random.default_rng(0)
    curves = rng.normal(5, 1, (3, 40))
    curves[:, 1::2] = np.nan
    pools = [curves[:, max(0, at + 1 - window) : at + 1] for at in range(0, 40, 2)]
    band = pool_seeds(list(curves), window)
    assert band.rounds.tolist() == list(range(1, 41, 2))
    assert band.mean == pytest.approx([np.nanmean(pool) for pool in pools])
    assert band.std == pytest.approx([np.nanstd(pool, ddof=1) for pool in pools])


def test_a_window_leaves_out_a_seed_that_has_ended() -> None:
    band = pool_seeds([np.array([100.0, 100.0]), np.array([1.0, 1.0, 3.0])], window=3)
    assert band.mean[-1] == pytest.approx(5 / 3)


def test_the_band_of_positive_numbers_stays_positive() -> None:
    band = pool_seeds([np.array([1e-6, 1.0]), np.array([1.0, 2.0])])
    assert band.low.tolist() == [1e-6, pytest.approx(1.5 - 0.5**0.5)]
    below = pool_seeds([np.array([-1.0]), np.array([1.0])])
    assert below.low[0] == pytest.approx(-(2**0.5))


def test_the_band_of_accuracies_ends_at_one() -> None:
    band = pool_seeds([np.array([0.8]), np.array([1.0])], top=1.0)
    assert band.high.tolist() == [1.0]


def test_curves_without_values_give_an_empty_band() -> None:
    assert pool_seeds([]).rounds.size == 0
    assert pool_seeds([np.empty(0), np.array([np.nan])]).rounds.size == 0


def test_a_log_axis_needs_positive_numbers_far_apart() -> None:
    assert spans_decades([np.array([1.0]), np.array([np.nan, 1e-3])])
    assert not spans_decades([np.array([1.0, 0.0])])
    assert not spans_decades([np.array([1.0, 0.1])])


def test_seeds_too_short_to_tell_are_left_out_of_rounds_and_speed_up() -> None:
    runs = [outcome("fedavg", seed, [0.1] * 7 + [0.7] * 5) for seed in (0, 1)]
    runs += [outcome("fedexp", seed, [0.1] * 3 + [0.7] * 9) for seed in (0, 1)]
    before = summarise(runs, "test_accuracy", 0.6)
    assert [line.rounds for line in before] == [[12, 12], [8, 8]]
    runs += [outcome("fedavg", 2, [0.1, 0.1]), outcome("fedexp", 2, [0.1])]
    after = summarise(runs, "test_accuracy", 0.6)
    for old, new in zip(before, after, strict=True):
        assert (new.speedup, new.rounds, new.finals) == (old.speedup, old.rounds, old.finals)
        assert (new.seeds, new.short, new.final_round) == (2, 1, 12)


def test_a_lucky_short_seed_does_not_count_where_an_unlucky_one_does_not() -> None:
    long = [outcome("fedexp", seed, [0.1] * 5 + [0.7] * 5) for seed in (0, 1)]
    lucky = outcome("fedexp", 2, [0.1] + [0.7] * 5)
    (line,) = summarise([*long, lucky], "test_accuracy", 0.6)
    assert (line.rounds, line.short) == ([10, 10, 6], 0)
    (line,) = summarise([*long, lucky, outcome("fedexp", 3, [0.1] * 6)], "test_accuracy", 0.6)
    assert (line.rounds, line.short) == ([10, 10], 2)


def test_a_seed_that_had_enough_rounds_and_missed_counts_as_missing() -> None:
    runs = [outcome("fedexp", 0, [0.1] + [0.7] * 9), outcome("fedexp", 1, [0.1] * 6)]
    (line,) = summarise(runs, "test_accuracy", 0.6)
    assert (line.mean_rounds, line.missed, line.short) == (None, [6], 0)


def test_one_long_run_does_not_replace_the_seeds_of_the_final_value() -> None:
    runs = [outcome("fedexp", seed, [0.5] * 10) for seed in (0, 1, 2)]
    (line,) = summarise(
        [*runs, outcome("fedexp", 3, [0.5] * 10 + [0.9] * 5)], "test_accuracy", None
    )
    assert (line.finals, line.final_round) == ([0.5] * 4, 10)


def test_a_lower_bound_under_one_is_no_speed_up() -> None:
    runs = [outcome("fedavg", 0, [0.1] * 3), outcome("fedexp", 0, [0.1] * 8 + [0.7] * 5)]
    assert summarise(runs, "test_accuracy", 0.6)[1].speedup is None


def reaching(name: str, rounds: Sequence[int]) -> list[Outcome]:
    """Return one outcome per seed, with its smoothed crossing of 0.6 at these rounds."""
    return [outcome(name, k, [0.1] * (at - 5) + [0.7] * (60 - at)) for k, at in enumerate(rounds)]


def test_five_seeds_give_a_speed_up_an_interval_over_pairs() -> None:
    slow, fast = [30, 40, 20, 28, 36], [15, 16, 12, 14, 12]
    fedavg, fedexp = summarise(
        [*reaching("fedavg", slow), *reversed(reaching("fedexp", fast))], "test_accuracy", 0.6
    )
    assert (fedavg.rounds, fedexp.rounds) == (slow, fast[::-1])
    assert fedexp.interval is not None
    logs = np.log(np.array(slow) / fast)  # seed by seed, in whatever order they came
    half = 2.776445 * np.std(logs, ddof=1) / np.sqrt(5)  # Student's t, four degrees of freedom
    assert np.log(fedexp.interval) == pytest.approx([logs.mean() - half, logs.mean() + half], 1e-3)
    assert fedavg.interval is None  # of itself


def test_without_five_pairs_a_speed_up_has_no_interval() -> None:
    slow, fast = [30, 40, 20, 28, 36], [15, 16, 12, 14, 12]
    for short in (reaching("fedexp", fast[:4]), reaching("fedexp", fast)[1:]):
        line = summarise([*reaching("fedavg", slow), *short], "test_accuracy", 0.6)[1]
        assert (line.speedup is None, line.interval) == (False, None)
    missed = [*reaching("fedavg", slow), outcome("fedavg", 5, [0.1] * 60)]
    line = summarise([*missed, *reaching("fedexp", fast)], "test_accuracy", 0.6)[1]
    assert (line.at_least, line.interval) == (True, None)


def test_equal_ratios_have_no_interval() -> None:
    runs = [*reaching("fedavg", [30, 40, 20, 28, 36]), *reaching("fedexp", [15, 20, 10, 14, 18])]
    line = summarise(runs, "test_accuracy", 0.6)[1]
    assert (line.speedup, line.interval) == (2.0, None)


def test_the_direction_of_a_metric_of_the_user() -> None:
    run = outcome("fedexp", 0, [0.1, *[0.5] * 5], metric="test_f1")
    assert summarise([run], "test_f1", 0.5, higher=True)[0].rounds == [6]
    assert summarise([run], "test_f1", 0.5, higher=False)[0].rounds == [1]


def test_the_band_of_a_clamped_step_size_ends_at_one() -> None:
    curves = [np.array([1.0, 1.0, 4.0]), np.array([1.0, 3.0, 5.0])]
    assert metric_band("server_lr", curves).low.tolist() == [
        1.0,
        1.0,
        pytest.approx(4.5 - 0.5**0.5),
    ]
    assert metric_band("train_loss", curves).low[1] == 1.0  # no curve has been lower
    free = metric_band("server_lr", [np.array([0.5]), np.array([1.5])])
    assert free.low[0] == 0.5  # a rule that does not clamp


def test_the_band_of_an_accuracy_stays_within_its_bounds() -> None:
    curves = [np.array([0.0, 0.5, 1.0]), np.array([0.2, 0.5, 0.8]), np.array([0.0, 0.5, 1.0])]
    for name in ("test_accuracy", "train_accuracy_worst_decile"):
        band = metric_band(name, curves)
        assert (band.low >= 0).all()
        assert (band.high <= 1).all()


def test_runs_that_diverged_do_not_decide_the_axis() -> None:
    good = outcome("fedavg", 0, [2.0, 1.0], metric="train_loss")
    high = outcome("fedavg", 1, [2.0, 1e15], metric="train_loss")
    gone, near = replace(high, diverged_at=2), outcome("fedavg", 1, [2.0, 2.5], 2, "train_loss")
    assert shown_range([good, gone], "train_loss") == (1.0, 2.0)
    assert not is_logarithmic([good, gone], "train_loss")
    assert shown_range([good, high], "train_loss") is None
    assert shown_range([gone], "train_loss") is None
    assert shown_range([good, near], "train_loss") is None
