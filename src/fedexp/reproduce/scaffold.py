"""Figures 4 and 8: extrapolation added to SCAFFOLD."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.reproduce import measures
from fedexp.reproduce.measures import FINAL, ROUNDS, grouped
from fedexp.reproduce.output import ALL, figure_title, task_figure
from fedexp.reproduce.published import Column, Table, by_task
from fedexp.reproduce.study import Findings, Plan, Result, Study

TIMES = "times SCAFFOLD-ExP"
NAME = "scaffold-exp"
ALGORITHMS = (NAME, "fedexp", "scaffold", "fedavg", "fedadagrad")
COLUMNS = (Column(ROUNDS, "rounds"), Column(TIMES, "times"), Column(FINAL, "%"))


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Whether SCAFFOLD-ExP is the best of all; what SCAFFOLD alone is worth is Table 1's."""
    lines = measures.reach(results, plan.rounds, NAME, TIMES)
    ends = by_task(lines, FINAL)
    checks = measures.each(NAME, "best", ends, measures.leads(NAME, False, "%", ALGORITHMS))
    groups, title = grouped(results), figure_title(plan)
    return Findings(Table(COLUMNS, lines), tuple(checks), lambda: task_figure(groups, title, ALL))


STUDY = Study(
    name=NAME,
    title="Figures 4 and 8: SCAFFOLD-ExP, FedExP and the baselines",
    needs="a GPU",
    rounds=500,
    seeds={task: measures.SEEDS[task] for task in ("cifar10", "emnist")},
    arms=measures.arms(*ALGORITHMS),
    measure=measure,
    remarks=(
        "the paper draws curves and prints no number; SCAFFOLD-ExP takes FedExP's best values",
        measures.TAU,
    ),
)
