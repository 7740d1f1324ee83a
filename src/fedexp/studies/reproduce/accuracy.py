"""What the studies of accuracy curves share: lines by task, and claims held against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedexp.experiments.outcome import Outcome
from fedexp.studies.published import Value, claim, target
from fedexp.studies.reproduce.lines import Line, text_of, winners
from fedexp.studies.reproduce.measures import final, grouped, ratio, rounds_to_target
from fedexp.studies.reproduce.study import Arm, Check, Result

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
