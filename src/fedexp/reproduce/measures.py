"""Numbers of accuracy and loss curves: rounds to a target, means over the last rounds, roughness.

Every function takes the outcomes of one series, one per seed, and returns a `Value` over seeds.
Accuracies are in percent, losses as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedexp.analysis import summary
from fedexp.reproduce.published import Value
from fedexp.reproduce.study import Result
from fedexp.runs.spec import Outcome


def grouped(results: Sequence[Result]) -> dict[str, dict[str, list[Outcome]]]:
    """Return outcomes by task and series, one per seed, in the given order."""
    groups: dict[str, dict[str, list[Outcome]]] = {}
    for result in results:
        series = groups.setdefault(result.job.task, {})
        series.setdefault(result.job.series, []).append(result.outcome)
    return groups


def on_common_seeds(series: Mapping[str, Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each series with the seeds that all of them have."""
    seeds = [{run.seed for run in runs} for runs in series.values()]
    common = set[int]().union(*seeds).intersection(*seeds)
    return {name: [r for r in runs if r.seed in common] for name, runs in series.items()}


def seeds_of(series: Mapping[str, Sequence[Outcome]]) -> int:
    """Return the number of seeds of the first series."""
    return len(next(iter(series.values()), ()))


def rounds_to_target(
    outcomes: Sequence[Outcome], target: float, rounds: int, window: int = 1
) -> Value:
    """Return the mean over seeds of the first round at the target test accuracy.

    With a `window`, of the first round at which the mean of so many evaluations is at the target.

    A seed that does not reach it counts with all `rounds` of the run, and the value is then
    marked "more than".

    The mean of first rounds, and not the first round of the mean curve: the latter would always
    be a multiple of the rounds between evaluations, which the numbers of Table 1 are not.
    """
    curves = [summary.smoothed(outcome.curve("test_accuracy"), window) for outcome in outcomes]
    hits = [summary.rounds_to(curve, target, higher=True) for curve in curves]
    reached = [hit for hit in hits if hit is not None]
    if len(reached) == len(hits):
        return Value(float(np.mean(reached)), summary.spread_of(np.array(reached)))
    remark = f"{len(reached)}/{len(hits)} seeds" if len(hits) > 1 else ""
    at_least = [rounds if hit is None else hit for hit in hits]
    return Value(float(np.mean(at_least)), more=True, remark=remark)


def ratio(value: Value, reference: Value) -> Value | None:
    """Return value over reference; None where the reference is not a plain number.

    >>> ratio(Value(328.0), Value(186.0)).mean.__round__(2)
    1.76
    """
    if value.mean is None or not reference.mean or reference.more:
        return None
    return Value(value.mean / reference.mean, more=value.more)


def final(outcomes: Sequence[Outcome], metric: str, last: int = 1, pooled: bool = False) -> Value:
    """Average the last rounds of each seed; return mean and deviation over seeds.

    With `pooled`, return them over all seeds and evaluations of the last rounds.
    """
    if any(outcome.diverged_at is not None for outcome in outcomes):
        return Value(None, remark="diverged")
    ends = [summary.last_values(outcome.curve(metric), last) for outcome in outcomes]
    if not all(len(end) for end in ends):
        return Value(None)
    values = np.concatenate(ends) if pooled else np.array([end.mean() for end in ends])
    spread, scale = summary.spread_of(values), 100.0 if summary.is_accuracy(metric) else 1.0
    return Value(scale * float(values.mean()), None if spread is None else scale * spread)


def final_loss(outcomes: Sequence[Outcome]) -> Value:
    """Return the last training loss, over seeds."""
    return final(outcomes, "train_loss")


def roughness(outcomes: Sequence[Outcome], metric: str) -> Value:
    """Return the mean absolute change from one evaluation to the next, in percent."""
    changes = [np.abs(np.diff(summary.numbers(outcome.curve(metric)))) for outcome in outcomes]
    if not all(change.size for change in changes):
        return Value(None)
    return Value(100 * float(np.mean([change.mean() for change in changes])))
