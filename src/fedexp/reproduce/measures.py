"""Numbers of curves: rounds to a target, means over the last rounds, unsteadiness.

What the studies of accuracy curves share: lines by task, and claims held against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedexp.analysis.summary import rounds_to
from fedexp.reproduce.published import Line, Value, claim, target, text_of, winners
from fedexp.reproduce.study import Arm, Check, Result
from fedexp.runs.spec import Outcome

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


ROUNDS, FINAL = "rounds to target", "final test accuracy"
SEEDS = {"emnist": 20, "cifar10": 5, "cifar100": 5, "cinic10": 5}  # Figures 8 to 11
TAU = (
    "the paper states no tau of FedAdagrad; mode paper takes the root of what the released code "
    "adds to v, so that first steps are as long as there"
)
Values = Mapping[str, Value]
Verdict = tuple[bool | None, str]


def arms(*names: str) -> Callable[[str], Sequence[Arm]]:
    """The same algorithms on every task, each with the paper's best values."""
    return lambda task: [Arm(name, name) for name in names]


def reach(results: Sequence[Result], rounds: int, reference: str, times: str) -> tuple[Line, ...]:
    """Rounds to the target of Table 1, how many times the reference's, and the final accuracy.

    Args:
        results: of all tasks.
        rounds: that were asked for.
        reference: the series whose rounds count as one.
        times: what the column of ratios is called.
    """
    lines = []
    for task, series in grouped(results).items():
        goal = target(task)
        needed = {name: rounds_to_target(runs, goal, rounds) for name, runs in series.items()}
        for name, runs in series.items():
            values = {ROUNDS: needed[name], FINAL: final(runs, "test_accuracy")}
            factor = _times(runs, series.get(reference, []), goal, rounds)
            if name != reference and factor:
                values[times] = factor
            lines.append(Line(task, name, values))
    return tuple(lines)


def _times(
    runs: Sequence[Outcome], reference: Sequence[Outcome], goal: float, rounds: int
) -> Value | None:
    """How many times the reference's rounds, over the seeds that both have."""
    both = {run.spec.seed for run in runs} & {run.spec.seed for run in reference}
    if not both:
        return None
    mine, theirs = ([run for run in of if run.spec.seed in both] for of in (runs, reference))
    return ratio(rounds_to_target(mine, goal, rounds), rounds_to_target(theirs, goal, rounds))


def each(
    study: str, key: str, values: Mapping[str, Values], judge: Callable[[Values], Verdict]
) -> list[Check]:
    """The same claim on every task."""
    checks = []
    for task, own in values.items():
        holds, seen = judge(own)
        checks.append(Check(claim(study, key), holds, seen, task))
    return checks


def leads(name: str, lowest: bool, unit: str, among: Sequence[str]) -> Callable[[Values], Verdict]:
    """Whether a series has the best number among others; not to be told while some are missing."""

    def judge(values: Values) -> Verdict:
        first = winners(values, lowest)
        missing = [other for other in among if other not in values]
        if name in missing or (missing and first in ([], [name])):
            return None, f"no run of {' and '.join(missing)}"
        if not first:
            return None, "no algorithm got there" if lowest else "no number"
        own, top = text_of(values.get(name), unit), text_of(values[first[0]], unit)
        if len(first) > 1 and name in first:
            return None, f"{' and '.join(first)} all have {top}"
        return first == [name], own if first == [name] else f"{own}; {first[0]} has {top}"

    return judge


def not_above(name: str, other: str) -> Callable[[Values], Verdict]:
    """Whether a series ends no higher than another."""

    def judge(values: Values) -> Verdict:
        mine, theirs = (values.get(each, Value(None)).mean for each in (name, other))
        if mine is None or theirs is None:
            return None, "no number"
        return mine <= theirs, f"{mine:.2f}% and {theirs:.2f}%"

    return judge


def only(values: Mapping[str, Values], tasks: Sequence[str]) -> dict[str, Values]:
    """The values of some tasks, where they are there."""
    return {task: own for task, own in values.items() if task in tasks}
