"""Statistics over the seeds of an algorithm.

`summarise` gives a comparison its table: rounds to a target, speed-up over FedAvg, final metric.
`pool_seeds` gives figures their curves: mean and standard deviation, round by round. A curve has
one value per round and NaN where the model was not evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedexp.runs.spec import Outcome, allow_rounding, is_better_higher

Curve = np.ndarray[Any, np.dtype[np.float64]]


def rounds_to(curve: Curve, target: float, higher: bool) -> int | None:
    """Return the first round, counted from 1, at which the curve reaches the target.

    >>> rounds_to(np.array([0.5, np.nan, 0.7]), 0.6, higher=True)
    3
    """
    goal = allow_rounding(target, higher)
    with np.errstate(invalid="ignore"):
        reached = np.flatnonzero(curve >= goal if higher else curve <= goal)
    return int(reached[0]) + 1 if reached.size else None


@dataclass(frozen=True)
class Line:
    """A row of the comparison: one algorithm over its seeds.

    Attributes:
        algorithm: its name.
        rounds: rounds to the target of each seed that reached it.
        seeds: number of seeds.
        finals: the final metric of each seed; NaN if the run diverged.
        spread: standard deviation of the final metric over seeds and the window of rounds that
            `finals` average; None for a single value.
        speedup: FedAvg's mean rounds over this one's; None unless all seeds reached the target.
        at_least: whether a seed of FedAvg missed the target, so that the speed-up is a lower bound.
    """

    algorithm: str
    rounds: list[int]
    seeds: int
    finals: list[float]
    spread: float | None = None
    speedup: float | None = None
    at_least: bool = False

    @property
    def mean_rounds(self) -> float | None:
        """None unless every seed reached the target: a mean over some would be too low."""
        return float(np.mean(self.rounds)) if len(self.rounds) == self.seeds else None


def summarise(
    outcomes: Sequence[Outcome], metric: str, target: float | None, smooth: int = 1
) -> list[Line]:
    """Return one line per algorithm, in the given order.

    The final metric is the mean over the last `smooth` rounds (20 in the paper's table of 2,000
    rounds). Rounds to the target are those of the unsmoothed curve, as in the paper's Table 1.
    """
    higher = is_better_higher(metric)
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.spec.algorithm, []).append(outcome)
    lines = []
    for name, group in by_name.items():
        curves = [outcome.curve(metric) for outcome in group]
        hits = [rounds_to(c, target, higher) if target is not None else None for c in curves]
        ends = [_end(o, c, smooth) for o, c in zip(group, curves, strict=True)]
        finals = [float(np.mean(end)) for end in ends]
        reached = [hit for hit in hits if hit is not None]
        lines.append(Line(name, reached, len(group), finals, spread_of(np.concatenate(ends))))
    reference = next((line for line in lines if line.algorithm == "fedavg"), None)
    if reference is None:
        return lines
    ended = [each for each in by_name["fedavg"] if each.diverged_at is None] or outcomes
    rounds = max(len(outcome.rows) for outcome in ended)
    return [_speedup(each, reference, rounds) for each in lines]


def spread_of(values: np.ndarray[Any, Any]) -> float | None:
    """Return the standard deviation of a sample; None for a single value."""
    return float(np.std(values, ddof=1)) if values.size > 1 else None


def _end(outcome: Outcome, curve: Curve, window: int) -> Curve:
    """Return the values of the last rounds, or else the last one; NaN for a run that diverged."""
    known = curve[~np.isnan(curve)]
    if outcome.diverged_at is not None or not known.size:
        return np.array([np.nan])
    last = curve[-window:]
    return last[~np.isnan(last)] if not np.isnan(last).all() else known[-1:]


def _speedup(line: Line, reference: Line, rounds: int) -> Line:
    """Add the speed-up; a seed of FedAvg that missed the target counts with all `rounds`."""
    if line.mean_rounds is None:
        return line
    missing = reference.seeds - len(reference.rounds)
    theirs = (sum(reference.rounds) + missing * rounds) / reference.seeds
    return replace(line, speedup=theirs / line.mean_rounds, at_least=missing > 0)


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and spread of curves, at the rounds at which any of them was evaluated.

    Attributes:
        rounds: counted from 1.
        mean: over the seeds that have a value.
        std: their standard deviation; 0 for one value.
        low: mean - std; the least value if that is not positive but all values are, for log axes.
        high: mean + std, or the upper bound of the metric.
        seeds: how many seeds have a value.
    """

    rounds: Curve
    mean: Curve
    std: Curve
    low: Curve
    high: Curve
    seeds: Curve


def pool_seeds(curves: Sequence[Curve], window: int = 1, top: float = np.inf) -> Band:
    """Pool curves round by round, also after the shorter ones have ended.

    Args:
        curves: one per seed.
        window: each round pools the last `window` rounds of the seeds that have a value there, as
            in the paper's long runs (docs/paper.md#rounds-and-seeds).
        top: the largest possible value.

    >>> band = pool_seeds([np.array([1.0, 2.0, 9.0]), np.array([3.0, np.nan])])
    >>> band.mean.tolist(), band.seeds.tolist()
    ([2.0, 2.0, 9.0], [2.0, 1.0, 1.0])
    """
    padded = np.full((len(curves), max((len(curve) for curve in curves), default=0)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    here = ~np.isnan(padded)
    evaluated = np.flatnonzero(here.any(axis=0))
    pools = [_known(padded[here[:, at], max(0, at + 1 - window) : at + 1]) for at in evaluated]
    mean = np.array([pool.mean() for pool in pools], dtype=np.float64)
    std = np.array([spread_of(pool) or 0.0 for pool in pools], dtype=np.float64)
    least = np.array([pool.min() for pool in pools], dtype=np.float64)
    low = np.where((mean <= std) & (least > 0), least, mean - std)
    rounds = (evaluated + 1).astype(np.float64)
    seeds = here.sum(axis=0)[evaluated].astype(np.float64)
    return Band(rounds, mean, std, low, np.minimum(mean + std, top), seeds)


def mean_and_spread(curves: Sequence[Curve], smooth: int = 1) -> tuple[Curve, Curve, Curve]:
    """Return rounds, mean and standard deviation where every curve has a value.

    >>> rounds, mean, spread = mean_and_spread([np.array([1.0, 2.0, 9.0]), np.array([3.0, 4.0])])
    >>> rounds.tolist(), mean.tolist()
    ([1.0, 2.0], [2.0, 3.0])
    """
    band = pool_seeds(curves, smooth)
    complete = band.seeds == len(curves)
    return band.rounds[complete], band.mean[complete], band.std[complete]


def spans_decades(curves: Sequence[Curve]) -> bool:
    """Return whether positive values differ by a factor above 100, so that a log axis helps."""
    known = _known(np.concatenate([*curves, np.empty(0)]))
    return bool(known.size and known.min() > 0 and known.max() / known.min() > 100)


def _known(values: Curve) -> Curve:
    return values[~np.isnan(values)]
