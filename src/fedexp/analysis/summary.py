"""Statistics over the seeds of an algorithm.

`summarise` gives a comparison its table: rounds to a target, speed-up over FedAvg, final metric.
`metric_band` gives figures their curves: mean and standard deviation, round by round. A curve has
one value per round and NaN where the model was not evaluated. Seeds may have unequal numbers of
rounds: one that is too short to tell whether it reaches the target is left out, and counted. Rounds
to a target are to the smoothed crossing, in every table but those beside the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedexp.experiment import allow_rounding
from fedexp.runs.spec import Outcome

Curve = np.ndarray[Any, np.dtype[np.float64]]
Crossed = tuple[Outcome, int | None]  # a run with its rounds to the target; None if it missed it
AT_LEAST_ONE = ("server_lr", "diversity")  # fields that most rules never let fall below 1
STRETCH = 3  # times the range of the other runs, above which those that diverged are cut off
WINDOW = 5  # evaluations that a smoothed curve averages
REFERENCE = "fedavg"  # the algorithm that speed-ups are over
LEAST_SEEDS = 5  # of a speed-up with an interval


def rounds_to(curve: Curve, target: float, higher: bool) -> int | None:
    """Return the first round, counted from 1, at which the curve reaches the target.

    >>> rounds_to(np.array([0.5, np.nan, 0.7]), 0.6, higher=True)
    3
    """
    goal = allow_rounding(target, higher)
    with np.errstate(invalid="ignore"):
        reached = np.flatnonzero(curve >= goal if higher else curve <= goal)
    return int(reached[0]) + 1 if reached.size else None


def smoothed(curve: Curve, window: int = WINDOW, least: int | None = None) -> Curve:
    """Return the curve with each evaluation replaced by the mean of the last `window` of them.

    It is NaN while there are fewer than `least`: by default fewer than `window`. `rounds_to` of it
    is the smoothed crossing of a target: the first crossing is an extreme value, which one lucky
    evaluation of a noisy curve decides.

    >>> smoothed(np.array([0.5, np.nan, 0.7, np.nan, 0.9]), window=2).tolist()
    [nan, nan, 0.6, nan, 0.8]
    """
    at, means = np.flatnonzero(~np.isnan(curve)), np.full(len(curve), np.nan)
    for count in range(least or window, len(at) + 1):
        means[at[count - 1]] = curve[at[max(0, count - window) : count]].mean()
    return means


def numbers(*curves: Curve) -> Curve:
    """Return the evaluations of some curves, without the NaN between them.

    >>> numbers(np.array([0.1, np.nan]), np.array([np.nan, 0.4])).tolist()
    [0.1, 0.4]
    """
    values = np.concatenate([np.empty(0), *curves])
    return values[~np.isnan(values)]


def last_values(curve: Curve, last: int) -> Curve:
    """Return the evaluations of the last rounds, or the latest one if those have none.

    >>> last_values(np.array([0.1, np.nan, 0.3, np.nan]), 1).tolist()
    [0.3]
    """
    end = numbers(curve[-last:])
    return end if end.size else numbers(curve)[-1:]


def crossing(outcome: Outcome, metric: str, target: float, higher: bool) -> int | None:
    """Return the rounds of a run to a target: to the smoothed crossing.

    Before the fifth evaluation the mean of all of them counts. A run that was to end at its first
    evaluation there (`stop_at`) counts with that one.
    """
    curve = outcome.curve(metric)
    hit = rounds_to(smoothed(curve, least=1), target, higher)
    return rounds_to(curve, target, higher) if hit is None and outcome.status == "target" else hit


def speedup_interval(
    slow: Mapping[int, float], fast: Mapping[int, float]
) -> tuple[float, float] | None:
    """Return the 95 % interval of a speed-up, paired over seeds, from rounds by seed.

    It is that of the geometric mean of the ratios, by Student's t of their logarithms; None for
    fewer than five seeds, where the two have not the same seeds, and where all ratios are equal.

    >>> slow, fast = dict(enumerate([8, 9, 10, 11, 12])), dict.fromkeys(range(5), 5)
    >>> low, high = speedup_interval(slow, fast)
    >>> round(low, 2), round(high, 2)
    (1.62, 2.42)
    """
    if len(slow) < LEAST_SEEDS or slow.keys() != fast.keys():
        return None
    ratios = [slow[seed] / fast[seed] for seed in slow]
    if len(set(ratios)) == 1:
        return None
    low, high = mean_interval(np.log(ratios))
    return float(np.exp(low)), float(np.exp(high))


def mean_interval(values: Curve) -> tuple[float, float]:
    """Return the 95 % interval of a mean by Student's t, whose quantile sums its density.

    >>> low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))  # 3 ± 2.776 sqrt(2.5 / 5)
    >>> round(low, 2), round(high, 2)
    (1.04, 4.96)
    """
    t, freedom = np.linspace(0, 100, 100_001), len(values) - 1
    mass = np.cumsum((1 + t * t / freedom) ** (-len(values) / 2))
    quantile = t[np.searchsorted(mass, 0.95 * mass[-1])]
    half = quantile * (spread_of(values) or 0.0) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


@dataclass(frozen=True)
class Line:
    """A row of the comparison: one algorithm over its seeds.

    Attributes:
        algorithm: its name.
        rounds: rounds to the target of each seed that reached it: the smoothed crossing.
        seeds: number of seeds, without those in `short`.
        finals: the final metric of each seed; NaN if the run diverged.
        spread: standard deviation of the final metric over seeds and the window of rounds that
            `finals` average; None for a single value.
        speedup: FedAvg's mean rounds over this one's; None unless all seeds reached the target.
        interval: 95 % interval of the speed-up, where all seeds of both reached the target.
        at_least: whether a seed of FedAvg missed the target, so that the speed-up is a lower bound.
        missed: number of rounds of each seed that missed the target and did not diverge.
        diverged: number of seeds that diverged.
        short: number of seeds that have too few rounds to tell; they count in no column but finals.
        final_round: the round that `finals` are of; earlier for a run that stopped at its target.
        reference: the line that the speed-up is over.
        reached: the seeds that `rounds` are of.
    """

    algorithm: str
    rounds: list[int]
    seeds: int
    finals: list[float]
    spread: float | None = None
    speedup: float | None = None
    at_least: bool = False
    missed: list[int] = field(default_factory=list)
    diverged: int = 0
    short: int = 0
    final_round: int | None = None
    reference: str | None = None
    reached: list[int] = field(default_factory=list)
    interval: tuple[float, float] | None = None

    @property
    def mean_rounds(self) -> float | None:
        """None unless every seed reached the target: a mean over some would be too low."""
        return float(np.mean(self.rounds)) if len(self.rounds) == self.seeds else None


def summarise(
    outcomes: Sequence[Outcome],
    metric: str,
    target: float | None,
    smooth: int = 1,
    higher: bool | None = None,
) -> list[Line]:
    """Return one line per algorithm, in the given order; see `summarise_groups`."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.algorithm, []).append(outcome)
    references = dict.fromkeys(by_name, REFERENCE) if REFERENCE in by_name else {}
    return summarise_groups(by_name, metric, target, smooth, higher, references)


def summarise_groups(
    groups: Mapping[str, Sequence[Outcome]],
    metric: str,
    target: float | None,
    smooth: int = 1,
    higher: bool | None = None,
    references: Mapping[str, str] | None = None,
) -> list[Line]:
    """Return one line per group of seeds.

    The final metric is the mean over the last `smooth` rounds (20 in the paper's table of 2,000
    rounds). It does not change rounds to the target, whose window is always `WINDOW` evaluations.

    Args:
        groups: outcomes by label, one per seed.
        metric: field of the records.
        target: value that counts as reached.
        smooth: window of the final metric, in rounds.
        higher: whether larger values are better; None for accuracies only.
        references: the group that the speed-up of a group is over; without one it has none.
    """
    higher = is_accuracy(metric) if higher is None else higher
    lines = {
        label: _line(label, group, metric, target, smooth, higher)
        for label, group in groups.items()
    }
    result = []
    for label, line in lines.items():
        reference = (references or {}).get(label)
        if reference is not None:
            ended = _without_diverged(groups[reference])
            every = ended or [outcome for group in groups.values() for outcome in group]
            longest = max(len(outcome.rows) for outcome in every)
            line = _speedup(line, lines[reference], longest)
        result.append(line)
    return result


def _line(
    label: str,
    group: Sequence[Outcome],
    metric: str,
    target: float | None,
    smooth: int,
    higher: bool,
) -> Line:
    runs: list[Crossed] = [(run, None) for run in group]
    if target is not None:
        runs = _long_enough([(run, crossing(run, metric, target, higher)) for run in group])
    reached = [(run.seed, hit) for run, hit in runs if hit is not None]
    final_round = common_length([_length(run) for run in _without_diverged(group)])
    ends = [
        _end(run, run.curve(metric)[:final_round], smooth)
        for run in group
        if run.diverged_at is not None or _length(run) >= final_round
    ]
    return Line(
        label,
        [hit for _, hit in reached],
        len(runs),
        [float(np.mean(end)) for end in ends],
        spread_of(np.concatenate(ends)),
        missed=[len(run.rows) for run, hit in runs if hit is None and run.diverged_at is None],
        diverged=sum(run.diverged_at is not None for run in group),
        short=len(group) - len(runs),
        final_round=final_round,
        reached=[seed for seed, _ in reached],
    )


def _length(outcome: Outcome) -> int:
    """Return the rounds that a run was given; a run that ended at its target has fewer rows."""
    return max(int(outcome.spec["rounds"]) if outcome.status == "target" else 0, len(outcome.rows))


def _long_enough(runs: list[Crossed]) -> list[Crossed]:
    """Return the seeds that are long enough to tell whether they reach the target.

    A seed that missed it is too short if it has fewer rounds than the slowest seed that reached
    it, or, where none did, than the longest seed. So is then every seed of no more rounds, whether
    it reached the target or not: to count only those that did would favour lucky seeds.
    """
    lengths = [_length(run) for run, _ in runs if run.diverged_at is None]
    slowest = max((hit for _, hit in runs if hit is not None), default=max(lengths, default=0))
    missed = [_length(run) for run, hit in runs if hit is None and run.diverged_at is None]
    cutoff = max((length for length in missed if length < slowest), default=-1)
    return [pair for pair in runs if pair[0].diverged_at is not None or _length(pair[0]) > cutoff]


def common_length(lengths: Sequence[int]) -> int:
    """Return the number of rounds at which runs of unequal length are compared.

    It is where rounds times seeds is largest, so that neither a trial of 5 rounds nor a single long
    run replaces several seeds of 500.

    >>> common_length([5, 500, 500]), common_length([500, 500, 500, 1200])
    (500, 500)
    """
    return max(lengths, default=0, key=lambda n: (n * sum(length >= n for length in lengths), n))


def spread_of(values: np.ndarray[Any, Any]) -> float | None:
    """Return the standard deviation of a sample, exactly 0 for equal values; None for one value."""
    if values.size < 2:
        return None
    return 0.0 if (values == values[0]).all() else float(np.std(values, ddof=1))


def _end(outcome: Outcome, curve: Curve, window: int) -> Curve:
    """Return the values of the last rounds, or else the last one; NaN for a run that diverged."""
    last = last_values(curve, window)
    return last if outcome.diverged_at is None and last.size else np.array([np.nan])


def _speedup(line: Line, reference: Line, longest: int) -> Line:
    """Add the speed-up; a seed of FedAvg that missed the target counts with the rounds it had.

    One that diverged counts with `longest`. A lower bound under 1 states nothing and is left out.
    """
    line = replace(line, reference=reference.algorithm)
    if line.mean_rounds is None:
        return line
    missing = reference.seeds - len(reference.rounds)
    diverged = missing - len(reference.missed)
    total = sum(reference.rounds) + sum(reference.missed) + diverged * longest
    speedup = total / reference.seeds / line.mean_rounds
    line = line if missing and speedup < 1 else replace(line, speedup=speedup, at_least=missing > 0)
    if missing or line.algorithm == reference.algorithm:
        return line
    slow, fast = (dict(zip(x.reached, x.rounds, strict=True)) for x in (reference, line))
    return replace(line, interval=speedup_interval(slow, fast))


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and spread of curves, at the rounds at which any of them was evaluated.

    Attributes:
        rounds: counted from 1.
        mean: over the seeds that have a value.
        std: their standard deviation; 0 for one value.
        low: mean - std; the least value of the round where that is below the lower bound of the
            metric, and never below all values of a metric that is never negative.
        high: mean + std; the greatest value where that is above the upper bound.
        seeds: how many seeds have a value.
    """

    rounds: Curve
    mean: Curve
    std: Curve
    low: Curve
    high: Curve
    seeds: Curve


def is_accuracy(name: str) -> bool:
    """Return whether a record field is a share between 0 and 1, shown in percent.

    >>> is_accuracy("test_accuracy"), is_accuracy("train_accuracy_worst_decile")
    (True, True)
    """
    return "accuracy" in name


def metric_band(name: str, curves: Sequence[Curve], window: int = 1) -> Band:
    """Pool the curves of a metric within the bounds of its values.

    Accuracies are in [0, 1]. The server step size is at least 1 if no value of these curves is
    below: its rule clamps it. What is never negative, such as most losses, has a band that is not.

    >>> low = metric_band("server_lr", [np.array([1.0]), np.array([3.0])]).low
    >>> low.tolist()
    [1.0]
    """
    every = numbers(*curves)
    bottom = 1.0 if name in AT_LEAST_ONE and every.size and every.min() >= 1 else None
    return pool_seeds(curves, window, 1.0 if is_accuracy(name) else np.inf, bottom)


def pool_seeds(
    curves: Sequence[Curve], window: int = 1, top: float = np.inf, bottom: float | None = None
) -> Band:
    """Pool curves round by round, also after the shorter ones have ended.

    Args:
        curves: one per seed.
        window: each round pools the last `window` rounds of the seeds that have a value there, as
            in the paper's long runs (docs/paper.md#rounds-and-seeds).
        top: the largest possible value.
        bottom: the smallest possible value; None for 0 where no value is negative.

    >>> band = pool_seeds([np.array([1.0, 2.0, 9.0]), np.array([3.0, np.nan])])
    >>> band.mean.tolist(), band.seeds.tolist()
    ([2.0, 2.0, 9.0], [2.0, 1.0, 1.0])
    """
    padded = np.full((len(curves), max((len(curve) for curve in curves), default=0)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    here = ~np.isnan(padded)
    evaluated = np.flatnonzero(here.any(axis=0))
    pools = [numbers(*padded[here[:, at], max(0, at + 1 - window) : at + 1]) for at in evaluated]
    mean = np.array([pool.mean() for pool in pools], dtype=np.float64)
    std = np.array([spread_of(pool) or 0.0 for pool in pools], dtype=np.float64)
    least = np.array([pool.min() for pool in pools], dtype=np.float64)
    most = np.array([pool.max() for pool in pools], dtype=np.float64)
    low, high = mean - std, mean + std
    outside = (low <= 0) & (least >= 0) if bottom is None else low < bottom
    rounds = (evaluated + 1).astype(np.float64)
    seeds = here.sum(axis=0)[evaluated].astype(np.float64)
    if least.size and least.min() >= 0:  # so that a log axis is not stretched
        low = np.maximum(low, least.min())
    low = np.where(outside, least, low)
    return Band(rounds, mean, std, low, np.where(high > top, most, high), seeds)


def spans_decades(curves: Sequence[Curve]) -> bool:
    """Return whether positive values differ by a factor above 100, so that a log axis helps."""
    values = numbers(*curves)
    return bool(values.size and values.min() > 0 and values.max() / values.min() > 100)


def shown_range(outcomes: Sequence[Outcome], metric: str) -> tuple[float, float] | None:
    """Return the range of an axis that runs which diverged would stretch; None to show all.

    The range is that of the other runs. An accuracy has no such problem.
    """
    good = numbers(*(outcome.curve(metric) for outcome in _without_diverged(outcomes)))
    every = numbers(*(outcome.curve(metric) for outcome in outcomes))
    if is_accuracy(metric) or not good.size or good.size == every.size:
        return None
    low, high = float(good.min()), float(good.max())
    with np.errstate(over="ignore"):
        stretched = every.max() - every.min() > STRETCH * (high - low or abs(high) or 1.0)
    return (low, high) if stretched else None


def is_logarithmic(outcomes: Sequence[Outcome], metric: str) -> bool:
    """Return whether the axis of a metric is logarithmic: not for accuracies, nor for one value.

    Runs that diverged do not decide it, unless all did.
    """
    deciding = _without_diverged(outcomes) or outcomes
    return not is_accuracy(metric) and spans_decades([run.curve(metric) for run in deciding])


def _without_diverged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.diverged_at is None]
