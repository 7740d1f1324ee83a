"""Mean and spread over seeds that need not be of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedexp.experiments.compare import spread_of

Curve = np.ndarray[Any, np.dtype[np.float64]]
WINDOW = 20  # rounds; as in the paper


@dataclass(frozen=True, eq=False)
class Spread:
    """What is drawn of the seeds of an algorithm, at the rounds that any of them was evaluated.

    Attributes:
        rounds: counted from 1.
        mean: over the seeds that have a value there.
        std: their standard deviation; 0 where there is one value.
        low: mean - std; the least value where that would leave the positive numbers, which a log
            axis cannot show.
        high: mean + std, or what no value can exceed.
        seeds: how many seeds have a value there.
    """

    rounds: Curve
    mean: Curve
    std: Curve
    low: Curve
    high: Curve
    seeds: Curve


def spread(curves: Sequence[Curve], window: int = 1, top: float = np.inf) -> Spread:
    """Pool the curves round by round; where a seed has ended the others go on.

    With a window, each round pools the last `window` rounds of the seeds that are still there, as
    the paper does in its long runs (App. D.5). `top` is what no value can exceed.

    >>> pooled = spread([np.array([1.0, 2.0, 9.0]), np.array([3.0, np.nan])])
    >>> pooled.mean.tolist(), pooled.seeds.tolist()
    ([2.0, 2.0, 9.0], [2.0, 1.0, 1.0])
    """
    padded = np.full((len(curves), max((len(curve) for curve in curves), default=0)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    here = ~np.isnan(padded)
    known = np.flatnonzero(here.any(axis=0))
    pools = [_pool(padded[here[:, at], max(0, at + 1 - window) : at + 1]) for at in known]
    mean = np.array([pool.mean() for pool in pools])
    std = np.array([spread_of(pool) or 0.0 for pool in pools])
    least = np.array([pool.min() for pool in pools])
    low = np.where((mean <= std) & (least > 0), least, mean - std)
    rounds, seeds = (known + 1).astype(np.float64), here.sum(axis=0)[known].astype(np.float64)
    return Spread(rounds, mean, std, low, np.minimum(mean + std, top), seeds)


def _pool(values: Curve) -> Curve:
    """The values that are there."""
    return values[~np.isnan(values)]


def spans_decades(curves: Sequence[Curve]) -> bool:
    """A log scale helps where positive values differ by more than a hundred times."""
    known = _pool(np.concatenate([*curves, np.empty(0)]))
    return bool(known.size and known.min() > 0 and known.max() / known.min() > 100)
