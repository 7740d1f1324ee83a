"""Run a spec to its end, and sum up over specs who reached what when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedexp.errors import DivergedError
from fedexp.experiments.spec import Spec

Row = dict[str, Any]
OnRound = Callable[[Spec, Row], None]


@dataclass(frozen=True)
class Outcome:
    """A finished run: one row of numbers a round, and where it diverged if it did."""

    spec: Spec
    rows: list[Row]
    seconds: float
    diverged_at: int | None = None

    def curve(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One number a round, NaN where it was not evaluated."""
        values = [row.get(name) for row in self.rows]
        return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def run_one(spec: Spec, on_round: OnRound) -> Outcome:
    """Run a spec to its end, or to where it diverges."""
    began, rows = time.perf_counter(), []
    diverged: int | None = None
    try:
        for record in spec.prepare().records():
            rows.append(record.to_json())
            on_round(spec, rows[-1])
    except DivergedError as error:
        diverged = error.round
    return Outcome(spec, rows, time.perf_counter() - began, diverged)


def rounds_to(curve: np.ndarray[Any, Any], target: float, higher: bool) -> int | None:
    """The first round, counted from 1, at which the curve reaches the target.

    >>> rounds_to(np.array([0.5, np.nan, 0.7]), 0.6, higher=True)
    3
    """
    with np.errstate(invalid="ignore"):
        reached = np.flatnonzero(curve >= target if higher else curve <= target)
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
    """

    algorithm: str
    rounds: list[int]
    seeds: int
    finals: list[float]
    speedup: float | None = None
    at_least: bool = False

    @property
    def mean_rounds(self) -> float | None:
        """None unless every seed reached the target: a mean over the lucky ones would flatter."""
        return float(np.mean(self.rounds)) if len(self.rounds) == self.seeds else None


def summarise(outcomes: Sequence[Outcome], metric: str, target: float | None) -> list[Line]:
    """One line an algorithm, in the order they were given."""
    higher = metric.endswith("accuracy")
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.spec.algorithm, []).append(outcome)
    lines = []
    for name, group in by_name.items():
        curves = [outcome.curve(metric) for outcome in group]
        hits = [rounds_to(c, target, higher) if target is not None else None for c in curves]
        finals = [_final(o, c) for o, c in zip(group, curves, strict=True)]
        lines.append(Line(name, [h for h in hits if h is not None], len(group), finals))
    reference = next((line for line in lines if line.algorithm == "fedavg"), None)
    asked = max(len(outcome.rows) for outcome in outcomes)
    return lines if reference is None else [_speedup(each, reference, asked) for each in lines]


def _final(outcome: Outcome, curve: np.ndarray[Any, Any]) -> float:
    known = curve[~np.isnan(curve)]
    return float("nan") if outcome.diverged_at is not None or not known.size else float(known[-1])


def _speedup(line: Line, reference: Line, asked: int) -> Line:
    """A seed of FedAvg that did not arrive counts as if it had in the last round, at least."""
    if line.mean_rounds is None:
        return line
    missing = reference.seeds - len(reference.rounds)
    theirs = (sum(reference.rounds) + missing * asked) / reference.seeds
    return replace(line, speedup=theirs / line.mean_rounds, at_least=missing > 0)
