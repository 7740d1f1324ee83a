"""The studies of accuracy curves: Tables 1, 4 and 5, SCAFFOLD-ExP and server momentum.

They differ in the algorithms, the columns, the claims and the layout of the figure, and are stated
as such at the end of the file; `accuracy_study` makes a `Study` of each. A claim is tested task by
task on one column, over the seeds that the compared series have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedexp.analysis.summary import WINDOW
from fedexp.reproduce import measures
from fedexp.reproduce.output import ALL, Groups, figure_title, study_figure, task_figure
from fedexp.reproduce.published import (
    Column,
    Line,
    Table,
    Value,
    best,
    claim,
    study_fields,
    target,
    text_of,
    winners,
)
from fedexp.reproduce.study import Arm, Check, Findings, Plan, Result, Study
from fedexp.runs.spec import Outcome
from fedexp.tasks.recipe import PAPER_TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[str, Value]  # of one task, by series
Verdict = tuple[bool | None, str]  # whether a claim holds, and the numbers seen
Names = tuple[str, ...]
Decide = Callable[[Names, Values, float], Verdict]  # series, the subject first; threshold
Series = Mapping[str, Sequence[Outcome]]  # of one task, one outcome per seed
Measure = Callable[[str, str, Series, int], dict[str, Value]]  # task, name, series, rounds

ROUNDS, FINAL, LOSS = "rounds to target", "final test accuracy", "final training loss"
SMOOTHED = "smoothed"  # crossing: the same for the mean of the last evaluations
TARGETED = tuple(study_fields("table1")["seeds"])  # the tasks with a target accuracy
CIFAR_AND_CINIC = ("cifar10", "cifar100", "cinic10")


@dataclass(frozen=True)
class ClaimTest:
    """A claim of the paper that is tested on a measured column, task by task.

    Attributes:
        key: the claim's key in `published.toml`.
        column: the measured column it is about, in the table or not.
        series: the series that it compares; its subject comes first.
        decide: returns the verdict on the values of one task.
        tasks: the tasks it is about; None for all.
        reading: the reading of eps, which is judged only where it was run; empty for the printed.
    """

    key: str
    column: str
    series: Names
    decide: Decide
    tasks: tuple[str, ...] | None = None
    reading: str = ""

    def checks(self, study: str, groups: Groups, values: Measure, rounds: int) -> Iterator[Check]:
        """Yield one check per task that has one of the series, over the seeds that all have."""
        for task, runs in groups.items():
            compared = {name: runs[name] for name in self.series if name in runs}
            read = not self.reading or any(self.reading in name for name in compared)
            if not compared or not read or (self.tasks is not None and task not in self.tasks):
                continue
            own, common = claim(study, self.key), measures.on_common_seeds(compared)
            seeds = measures.seeds_of(common)
            if not seeds:
                yield Check(own, None, "no seed in common", task, seeds, self.reading)
                continue
            measured = {name: values(task, name, common, rounds) for name in common}
            column = {n: each[self.column] for n, each in measured.items() if self.column in each}
            holds, seen = self.decide(self.series, column, own.threshold)
            about = (task, seeds, self.reading, self.column, self.series)
            yield Check(own, holds, seen, *about)


def accuracy_study(
    name: str,
    *,
    values: Measure,
    columns: tuple[Column, ...],
    claims: Sequence[ClaimTest],
    figure: Callable[[Groups, str], Figure],
    arms: Callable[[str], Sequence[Arm]],
    series: str = "algorithm",
) -> Study:
    """Return a study with one line per task and series.

    Args:
        name: the name of the study, also of its claims.
        values: returns the values of a series from the outcomes of its task and the rounds.
        columns: the columns of the table.
        claims: the paper's claims.
        figure: draws the outcomes under a title.
        arms: returns the curves on a task.
        series: header of the table's second column.
    """

    def measure(plan: Plan, results: Sequence[Result]) -> Findings:
        groups = measures.grouped(results)
        lines = tuple(
            Line(task, own, values(task, own, outcomes, plan.rounds))
            for task, outcomes in groups.items()
            for own in outcomes
        )
        checks = tuple(
            check for each in claims for check in each.checks(name, groups, values, plan.rounds)
        )
        title = figure_title(plan)
        return Findings(Table(columns, lines, series), checks, lambda: figure(groups, title))

    return Study(**study_fields(name), arms=arms, measure=measure)


def same_arms(*algorithms: str) -> Callable[[str], Sequence[Arm]]:
    """Return the same algorithms for every task, each with the paper's tuned values."""
    return lambda task: [Arm(name, name) for name in algorithms]


# What the paper's eps may mean (docs/paper.md#released-epsilon): what is printed, the series with
# the bare name of the algorithm, or one of these.

READINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "participants x eps": (("server.eps_mode", "participants"),),
    "participants x decaying eps": (
        ("server.eps_mode", "participants"),
        ("server.eps_decay", repr(PAPER_TRAINING.lr_decay**2)),
    ),
}


def of_reading(algorithm: str, reading: str) -> str:
    """Return the series of an algorithm in a reading of eps, "" for the printed one.

    >>> of_reading("fedexp", "participants x eps"), of_reading("fedexp", "")
    ('fedexp (participants x eps)', 'fedexp')
    """
    return f"{algorithm} ({reading})" if reading else algorithm


def reading_arm(algorithm: str, reading: str) -> Arm:
    """Return an arm of mode paper that differs in the reading of eps alone."""
    return Arm(of_reading(algorithm, reading), algorithm, READINGS[reading], mode="paper")


# Values of one series.


def reach(reference: str, title: str, *published: str | None) -> dict[str, Any]:
    """Return values and columns: rounds to Table 1's target, by both crossings, and the accuracy.

    Args:
        reference: the series that the rounds of the other series are divided by, over the seeds
            that both have.
        title: how the column of these ratios names it.
        published: the paper's quantities of rounds and of these ratios.
    """
    times, (rounds_there, ratio_there) = f"times {title}", published or (None, None)

    def values(task: str, name: str, series: Series, rounds: int) -> dict[str, Value]:
        runs, others = series[name], series.get(reference, ())
        own: dict[str, Value] = {
            ROUNDS: measures.rounds_to_target(runs, target(task), rounds),
            SMOOTHED: measures.rounds_to_target(runs, target(task), rounds, WINDOW),
            FINAL: measures.final(runs, "test_accuracy"),
            LOSS: measures.final_loss(runs),
        }
        both = {run.seed for run in runs} & {run.seed for run in others}
        if both and name != reference:
            ours, theirs = (
                measures.rounds_to_target(
                    [run for run in x if run.seed in both], target(task), rounds
                )
                for x in (runs, others)
            )
            if (factor := measures.ratio(ours, theirs)) is not None:
                own[times] = factor
        return own

    columns = (
        Column(ROUNDS, "rounds", rounds_there),
        Column(SMOOTHED, "rounds"),
        Column(times, "times", ratio_there),
        Column(FINAL, "%"),
    )
    return {"values": values, "columns": columns}


def training_accuracy(task: str, name: str, series: Series, rounds: int) -> dict[str, Value]:
    """Return the training accuracy over the last 10 rounds, as in Table 4."""
    return {TRAINING: measures.final(series[name], "train_accuracy", LAST_10)}


def long_run_values(task: str, name: str, series: Series, rounds: int) -> dict[str, Value]:
    """Return the test accuracy as in Table 5; the synthetic task has a training loss only."""
    loss = {LOSS: measures.final_loss(series[name])}
    if task == "synthetic":
        return loss
    return {TEST: measures.final(series[name], "test_accuracy", LAST_20, pooled=True), **loss}


# Tests of claims.


def leads(lowest: bool, unit: str) -> Decide:
    """Test whether the subject has the best number; undecided while a series is missing."""

    def decide(names: Names, values: Values, threshold: float) -> Verdict:
        name, first = names[0], winners(values, lowest)
        missing = [each for each in names if each not in values]
        if name in missing or (missing and first in ([], [name])):
            return None, f"no run of {' and '.join(missing)}"
        if not first:
            return None, "no algorithm reached the target" if lowest else "no number"
        own, top = text_of(values.get(name), unit), text_of(values[first[0]], unit)
        if len(first) > 1 and name in first:
            return None, f"{' and '.join(first)} all have {top}"
        return first == [name], own if first == [name] else f"{own}; {first[0]} has {top}"

    return decide


def compares(holds: Callable[[float, float, float], bool], shown: str = "{:.2f}%") -> Decide:
    """Test a relation between the numbers of two series and the threshold."""

    def decide(names: Names, values: Values, threshold: float) -> Verdict:
        first, second = (values.get(each, Value(None)).mean for each in names)
        if first is None or second is None:
            return None, "no number"
        return holds(first, second, threshold), f"{shown.format(first)} and {shown.format(second)}"

    return decide


BELOW = compares(lambda a, b, _: a < b, "{:.3g}")
NOT_ABOVE = compares(lambda a, b, _: a <= b)
NEAR = compares(lambda a, b, most: abs(a - b) <= most)


def speedup(names: Names, values: Values, threshold: float) -> Verdict:
    """Test FedAvg's rounds against FedExP's; a lower bound decides only where it suffices."""
    if not set(names) <= values.keys():
        return None, "no run of both"
    ours, theirs = (values[name] for name in names)
    factor = measures.ratio(theirs, ours)
    if factor is None or factor.mean is None:
        return None if theirs.more else False, "FedExP did not reach the target"
    seen = f"{text_of(factor, 'times').removesuffix('x')} times"
    return None if factor.more and factor.mean < threshold else factor.mean >= threshold, seen


def margin(names: Names, values: Values, threshold: float) -> Verdict:
    """Test by how many points the subject ends above the closest of the others."""
    others = {name: value for name, value in values.items() if name != names[0]}
    closest, ours = best(others, lowest=False), values.get(names[0], Value(None)).mean
    if closest is None or ours is None:
        return None, "no number"
    points = ours - (others[closest].mean or 0.0)
    seen = f"{points:+.2f} points from {closest}"
    if points < threshold:
        return False, seen
    missing = [name for name in names if name not in values]  # could be closer
    return (None, f"{seen}; no run of {' and '.join(missing)}") if missing else (True, seen)


def best_eps(interior: bool) -> Decide:
    """Test whether the best eps is between the smallest and the largest, or else the smallest."""

    def decide(names: Names, values: Values, threshold: float) -> Verdict:
        first, ends = winners(values, lowest=False), (_eps(EXPONENTS[0]), _eps(EXPONENTS[-1]))
        if len(values) < len(names):
            return None, f"{len(values)} of {len(names)} values were run"
        if len(first) != 1:
            return None, f"a tie of {' and '.join(first)}" if first else "no number"
        holds = first[0] not in ends if interior else first[0] == ends[0]
        return holds, f"best at eps = {first[0]}"

    return decide


def adam_like_momentum(names: Names, values: Values, threshold: float) -> Verdict:
    """Test whether FedAdam and FedAvg-M are nearer to each other than to FedExP-M."""
    exp, adam, avg = (values.get(name, Value(None)).mean for name in names)
    if adam is None or avg is None or exp is None:
        return None, "no number"
    apart = abs(adam - avg)
    return apart < min(abs(exp - adam), abs(exp - avg)), f"{apart:.2f} points apart"


# Table 1 with Figure 3: rounds to a target accuracy, FedExP and three baselines.

TABLE1_ALGORITHMS = ("fedexp", "fedavg", "scaffold", "fedadagrad")
BASELINES = TABLE1_ALGORITHMS[1:]


def _table1_arms(task: str) -> list[Arm]:
    readings = [reading_arm("fedexp", reading) for reading in READINGS]
    return [Arm("fedexp", "fedexp"), *readings, *same_arms(*BASELINES)(task)]


def _claims_about_fedexp(reading: str) -> list[ClaimTest]:
    """Return the claims whose subject is FedExP, in one reading of eps."""
    own = of_reading("fedexp", reading)
    return [
        ClaimTest("fastest", ROUNDS, (own, *BASELINES), leads(True, "rounds"), None, reading),
        ClaimTest("speedup", ROUNDS, (own, "fedavg"), speedup, None, reading),
        ClaimTest("margin", FINAL, (own, *BASELINES), margin, CIFAR_AND_CINIC, reading),
        ClaimTest("loss", LOSS, ("scaffold", own), BELOW, ("emnist",), reading),
    ]


TABLE1 = accuracy_study(
    "table1",
    arms=_table1_arms,
    **reach("fedexp", "FedExP", "table1-rounds", "table1-ratio"),
    claims=(
        *(each for reading in ("", *READINGS) for each in _claims_about_fedexp(reading)),
        ClaimTest("scaffold", FINAL, ("scaffold", "fedavg"), NOT_ABOVE, CIFAR_AND_CINIC),
        ClaimTest("adagrad", FINAL, ("fedadagrad", "fedavg"), NEAR, CIFAR_AND_CINIC),
    ),
    figure=partial(task_figure, metrics=ALL, targets={task: target(task) for task in TARGETED}),
)

# Table 4: sensitivity of FedExP to eps, at the client step size of the table's caption
# (docs/paper.md#epsilon-sensitivity).

LAST_10 = 10  # rounds
EXPONENTS = ("-3", "-2.5", "-2", "-1.5", "-1")
TRAINING = f"training accuracy (last {LAST_10} rounds)"


def _eps(exponent: str) -> str:
    return f"10^{exponent}"


ALL_EPS = tuple(map(_eps, EXPONENTS))


def _epsilon_arms(task: str) -> list[Arm]:
    local_lr = repr(10**-0.5 if task == "emnist" else 1e-2)
    return [
        Arm(
            _eps(exponent),
            "fedexp",
            (("server.eps", repr(10 ** float(exponent))), ("local.lr", local_lr)),
        )
        for exponent in EXPONENTS
    ]


EPSILON_TABLE = accuracy_study(
    "epsilon-table",
    arms=_epsilon_arms,
    values=training_accuracy,
    columns=(Column(TRAINING, "%", "epsilon-table"),),
    series="eps",
    claims=(
        ClaimTest("emnist", TRAINING, ALL_EPS, best_eps(interior=True), ("emnist",)),
        ClaimTest("others", TRAINING, ALL_EPS, best_eps(interior=False), CIFAR_AND_CINIC),
    ),
    figure=partial(study_figure, metrics=("train_accuracy",)),
)

# Table 5 with Figures 12 to 14: two thousand rounds, with FedProx.

LAST_20 = 20  # rounds of mean and moving average (docs/paper.md#rounds-and-seeds)
TEST = "test accuracy"
CURVES = ("train_loss", "train_accuracy", "test_accuracy")
LONG_RUN_ALGORITHMS = (*TABLE1_ALGORITHMS, "fedprox")

LONG_RUN = accuracy_study(
    "long-run",
    arms=same_arms(*LONG_RUN_ALGORITHMS),
    values=long_run_values,
    columns=(Column(TEST, "%", "long-run"), Column(LOSS, "")),
    claims=(ClaimTest("best", TEST, LONG_RUN_ALGORITHMS, leads(False, "%")),),
    figure=partial(study_figure, metrics=CURVES, window=LAST_20),
)

# Figures 4 and 8: extrapolation added to SCAFFOLD (docs/paper.md#scaffold-exp). On EMNIST it
# collapses with eps as printed, so the other reading is run as well.

SCAFFOLD_ALGORITHMS = ("scaffold-exp", "fedexp", "scaffold", "fedavg", "fedadagrad")
PARTICIPANTS = next(iter(READINGS))
SCAFFOLD_READING = (
    of_reading("scaffold-exp", PARTICIPANTS),
    of_reading("fedexp", PARTICIPANTS),
    *SCAFFOLD_ALGORITHMS[2:],
)


def _scaffold_arms(task: str) -> list[Arm]:
    readings = [reading_arm(name, PARTICIPANTS) for name in SCAFFOLD_ALGORITHMS[:2]]
    return [*same_arms(*SCAFFOLD_ALGORITHMS)(task), *(readings if task == "emnist" else ())]


SCAFFOLD_EXP = accuracy_study(
    "scaffold-exp",
    arms=_scaffold_arms,
    **reach("scaffold-exp", "SCAFFOLD-ExP"),
    claims=(
        ClaimTest("best", FINAL, SCAFFOLD_ALGORITHMS, leads(False, "%")),
        ClaimTest("best", FINAL, SCAFFOLD_READING, leads(False, "%"), None, PARTICIPANTS),
    ),
    figure=partial(task_figure, metrics=ALL),
)

# Figures 15 to 17: FedExP with server momentum against FedAdam and FedAvg-M
# (docs/paper.md#fedexp-m).

MOMENTUM_ALGORITHMS = ("fedexp-m", "fedadam", "fedavgm")

MOMENTUM = accuracy_study(
    "momentum",
    arms=same_arms(*MOMENTUM_ALGORITHMS),
    **reach("fedexp-m", "FedExP-M"),
    claims=(
        ClaimTest("best", ROUNDS, MOMENTUM_ALGORITHMS, leads(True, "rounds")),
        ClaimTest("similar", FINAL, MOMENTUM_ALGORITHMS, adam_like_momentum),
    ),
    figure=partial(study_figure, metrics=CURVES, window=LAST_20),
)
