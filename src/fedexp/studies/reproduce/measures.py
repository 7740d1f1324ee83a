"""Numbers of curves: rounds to a target, means over the last rounds, unsteadiness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedexp.experiments.compare import rounds_to
from fedexp.experiments.outcome import Outcome
from fedexp.studies.published import Value
from fedexp.studies.reproduce.study import Result

Curve = np.ndarray[Any, np.dtype[np.float64]]


def grouped(results: Sequence[Result]) -> dict[str, dict[str, list[Outcome]]]:
    """Outcomes by task and series, seed by seed, in the order they were given."""
    groups: dict[str, dict[str, list[Outcome]]] = {}
    for result in results:
        own = groups.setdefault(result.job.task, {})
        own.setdefault(result.job.series, []).append(result.outcome)
    return groups


def rounds_to_target(outcomes: Sequence[Outcome], target: float, asked: int) -> Value:
    """Mean over seeds of the first round at the target; "more than" unless all seeds get there.

    A seed that does not get there counts as if it had in the last round, at least.

    The mean of first rounds, and not the first round of the mean curve: the latter would always
    be a multiple of the rounds between evaluations, which the numbers of Table 1 are not.
    """
    hits = [rounds_to(o.curve("test_accuracy"), target, higher=True) for o in outcomes]
    reached = [hit for hit in hits if hit is not None]
    if len(reached) == len(hits):
        return Value(float(np.mean(reached)), _deviation(reached))
    remark = f"{len(reached)}/{len(hits)} seeds" if len(hits) > 1 else ""
    at_least = [asked if hit is None else hit for hit in hits]
    return Value(float(np.mean(at_least)), more=True, remark=remark)


def ratio(value: Value, reference: Value) -> Value | None:
    """How many times the reference's rounds; more than that where it did not arrive.

    >>> ratio(Value(328.0), Value(186.0)).mean.__round__(2)
    1.76
    """
    if value.mean is None or not reference.mean or reference.more:
        return None
    return Value(value.mean / reference.mean, more=value.more)


def tail(outcomes: Sequence[Outcome], metric: str, last: int) -> Value:
    """Mean and deviation over seeds and over the evaluations of the last rounds, in percent."""
    return _pooled(outcomes, metric, last, by_seed=False)


def final(outcomes: Sequence[Outcome], metric: str, last: int = 1) -> Value:
    """The mean of the last rounds of each seed; mean and deviation over seeds, in percent."""
    return _pooled(outcomes, metric, last, by_seed=True)


def final_loss(outcomes: Sequence[Outcome]) -> Value:
    """The training loss at the end, over seeds."""
    return _pooled(outcomes, "train_loss", 1, by_seed=True, scale=1.0)


def _pooled(
    outcomes: Sequence[Outcome], metric: str, last: int, by_seed: bool, scale: float = 100.0
) -> Value:
    if any(outcome.diverged_at is not None for outcome in outcomes):
        return Value(None, remark="diverged")
    ends = [last_values(outcome.curve(metric), last) for outcome in outcomes]
    if not all(len(end) for end in ends):
        return Value(None)
    numbers = [float(end.mean()) for end in ends] if by_seed else np.concatenate(ends).tolist()
    spread = _deviation(numbers)
    return Value(scale * float(np.mean(numbers)), None if spread is None else scale * spread)


def last_values(curve: Curve, last: int) -> Curve:
    """The evaluations of the last rounds; the latest one where none of those was evaluated.

    >>> last_values(np.array([0.1, np.nan, 0.3, np.nan]), 1).tolist()
    [0.3]
    """
    end = curve[-last:]
    known = end[~np.isnan(end)]
    return known if len(known) else curve[~np.isnan(curve)][-1:]


def roughness(outcomes: Sequence[Outcome], metric: str) -> Value:
    """How much the curve changes from one evaluation to the next, on average, in percent."""
    steps = []
    for outcome in outcomes:
        curve = outcome.curve(metric)
        known = curve[~np.isnan(curve)]
        steps.append(float(np.abs(np.diff(known)).mean()) if len(known) > 1 else np.nan)
    mean = float(np.mean(steps))
    return Value(None) if np.isnan(mean) else Value(100 * mean)


def _deviation(numbers: Sequence[float]) -> float | None:
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
