"""Figures 15 to 17: FedExP with server momentum against FedAdam and FedAvg-M."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.reproduce import measures
from fedexp.reproduce.measures import FINAL, ROUNDS, Values, Verdict, grouped
from fedexp.reproduce.output import figure_title, study_figure
from fedexp.reproduce.published import Column, Table, Value, by_task
from fedexp.reproduce.study import Findings, Plan, Result, Study

TIMES, WINDOW = "times FedExP-M", 20
COLUMNS = (Column(ROUNDS, "rounds"), Column(TIMES, "times"), Column(FINAL, "%"))
ALGORITHMS = ("fedexp-m", "fedadam", "fedavgm")
METRICS = ("train_loss", "train_accuracy", "test_accuracy")


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Whether FedExP-M is the fastest, and the other two alike."""
    lines = measures.reach(results, plan.rounds, "fedexp-m", TIMES)
    rounds, ends = by_task(lines, ROUNDS), by_task(lines, FINAL)
    checks = (
        *measures.each("momentum", "best", rounds, _fastest),
        *measures.each("momentum", "similar", ends, _similar),
    )
    groups, title = grouped(results), figure_title(plan)
    return Findings(
        Table(COLUMNS, lines), checks, lambda: study_figure(groups, title, METRICS, window=WINDOW)
    )


_fastest = measures.leads("fedexp-m", True, "rounds", ALGORITHMS)


def _similar(values: Values) -> Verdict:
    exp, adam, avg = (values.get(name, Value(None)).mean for name in ALGORITHMS)
    if adam is None or avg is None or exp is None:
        return None, "no number"
    apart = abs(adam - avg)
    return apart < min(abs(exp - adam), abs(exp - avg)), f"{apart:.2f} points apart"


STUDY = Study(
    name="momentum",
    title="Figures 15 to 17: server momentum with extrapolation",
    needs="a GPU",
    rounds=500,
    seeds={"cifar10": 3, "cifar100": 3},
    arms=measures.arms(*ALGORITHMS),
    measure=measure,
    remarks=(
        "the paper draws curves and prints no number; it states neither the momentum (0.9 in the "
        "released code) nor the rounds (500, as in its section 6)",
        "the targets are those of Table 1",
    ),
)
