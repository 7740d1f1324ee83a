"""Table 5 with Figures 12 to 14: two thousand rounds, with FedProx."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.reproduce import measures
from fedexp.reproduce.measures import final_loss, grouped, tail
from fedexp.reproduce.output import figure_title, study_figure
from fedexp.reproduce.published import Column, Line, Table, Value, by_task
from fedexp.reproduce.study import Findings, Plan, Result, Study

LAST = 20  # rounds: of the table's mean and of the moving average
ACCURACY, LOSS = "test accuracy", "final training loss"
COLUMNS = (Column(ACCURACY, "%", "long-run"), Column(LOSS, ""))
ALGORITHMS = ("fedexp", "fedavg", "scaffold", "fedadagrad", "fedprox")
METRICS = ("train_loss", "train_accuracy", "test_accuracy")


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Test accuracies beside Table 5; the synthetic task has a training loss only."""
    groups = grouped(results)
    lines = []
    for task, series in groups.items():
        for name, runs in series.items():
            values: dict[str, Value] = {LOSS: final_loss(runs)}
            if task != "synthetic":
                values[ACCURACY] = tail(runs, "test_accuracy", LAST)
            lines.append(Line(task, name, values))
    ends = by_task(lines, ACCURACY)
    judge = measures.leads("fedexp", False, "%", ALGORITHMS)
    checks = measures.each("long-run", "best", ends, judge)
    title = figure_title(plan)
    return Findings(
        Table(COLUMNS, tuple(lines)),
        tuple(checks),
        lambda: study_figure(groups, title, METRICS, window=LAST),
    )


STUDY = Study(
    name="long-run",
    title="Table 5 and Figures 12 to 14: after 2,000 rounds, with FedProx",
    needs="a GPU, and patience",
    rounds=2000,
    seeds={"synthetic": 1, "emnist": 3, "cifar10": 3, "cifar100": 3, "cinic10": 3},
    arms=measures.arms(*ALGORITHMS),
    measure=measure,
    small_rounds=40,
    remarks=(
        "the paper prints no best mu of FedProx; those of the released code are taken",
        measures.TAU,
        "mean and deviation over the seeds and the evaluations of the last 20 rounds",
    ),
)
