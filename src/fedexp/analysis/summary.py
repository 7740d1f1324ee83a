"""Sum up over runs who reached what when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedexp.runs.spec import Outcome, allow_rounding


def rounds_to(curve: np.ndarray[Any, Any], target: float, higher: bool) -> int | None:
    """The first round, counted from 1, at which the curve reaches the target.

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
        rounds: rounds to the target of each seed that reached it.
        seeds: number of seeds.
        speedup: FedAvg's mean rounds over this one's; None unless all seeds reached.
        at_least: FedAvg did not get there, so the speed-up is more than that.
        finals: the metric at the end, seed by seed; NaN where the run diverged.
        spread: standard deviation of the metric at the end, over seeds and the window of rounds
            that `finals` average; None where there is one value.
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
        """None unless every seed reached the target: a mean over the lucky ones would flatter."""
        return float(np.mean(self.rounds)) if len(self.rounds) == self.seeds else None


def summarise(
    outcomes: Sequence[Outcome], metric: str, target: float | None, smooth: int = 1
) -> list[Line]:
    """One line an algorithm, in the order they were given.

    The metric at the end is its mean over the last `smooth` rounds (20 in the paper's table of
    2,000 rounds). Rounds to the target are those of the curve as it is, as in the paper's Table 1.
    """
    higher = metric.endswith("accuracy")
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
    asked = max(len(outcome.rows) for outcome in ended)
    return [_speedup(each, reference, asked) for each in lines]


def spread_of(values: np.ndarray[Any, Any]) -> float | None:
    """The standard deviation of a sample; None for a single value."""
    return float(np.std(values, ddof=1)) if values.size > 1 else None


def _end(outcome: Outcome, curve: np.ndarray[Any, Any], window: int) -> np.ndarray[Any, Any]:
    """The values of the last rounds, or of the last evaluation; NaN for a run that diverged."""
    known = curve[~np.isnan(curve)]
    if outcome.diverged_at is not None or not known.size:
        return np.array([np.nan])
    last = curve[-window:]
    return last[~np.isnan(last)] if not np.isnan(last).all() else known[-1:]


def _speedup(line: Line, reference: Line, asked: int) -> Line:
    """A seed of FedAvg that did not arrive counts as if it had in the last round, at least."""
    if line.mean_rounds is None:
        return line
    missing = reference.seeds - len(reference.rounds)
    theirs = (sum(reference.rounds) + missing * asked) / reference.seeds
    return replace(line, speedup=theirs / line.mean_rounds, at_least=missing > 0)
