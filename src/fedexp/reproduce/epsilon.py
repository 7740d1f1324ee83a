"""Table 4: how sensitive FedExP is to eps."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.reproduce import measures
from fedexp.reproduce.measures import Values, final, grouped
from fedexp.reproduce.output import figure_title, study_figure
from fedexp.reproduce.published import Column, Line, Table, by_task, claim, winners
from fedexp.reproduce.study import Arm, Check, Findings, Plan, Result, Study

LAST = 10
EXPONENTS = ("-3", "-2.5", "-2", "-1.5", "-1")
ACCURACY = f"training accuracy (last {LAST} rounds)"
COLUMNS = (Column(ACCURACY, "%", "epsilon-table"),)


def arms(task: str) -> list[Arm]:
    """The five values of eps; the client step size is the one of the table's caption."""
    local_lr = 10**-0.5 if task == "emnist" else 1e-2
    return [
        Arm(
            f"10^{exponent}",
            "fedexp",
            (("server.eps", repr(10 ** float(exponent))), ("local.lr", repr(local_lr))),
        )
        for exponent in EXPONENTS
    ]


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Training accuracies beside Table 4."""
    groups = grouped(results)
    lines = tuple(
        Line(task, name, {ACCURACY: final(runs, "train_accuracy", LAST)})
        for task, series in groups.items()
        for name, runs in series.items()
    )
    title = figure_title(plan)
    return Findings(
        Table(COLUMNS, lines, "eps"),
        tuple(_check(task, values) for task, values in by_task(lines, ACCURACY).items()),
        lambda: study_figure(groups, title, ("train_accuracy",)),
    )


def _check(task: str, values: Values) -> Check:
    first, ends = winners(values, lowest=False), (f"10^{EXPONENTS[0]}", f"10^{EXPONENTS[-1]}")
    said = claim("epsilon-table", "emnist" if task == "emnist" else "others")
    if len(values) < len(EXPONENTS):
        return Check(said, None, f"{len(values)} of {len(EXPONENTS)} values were run", task)
    if len(first) != 1:
        return Check(said, None, f"a tie of {' and '.join(first)}" if first else "no number", task)
    holds = first[0] not in ends if task == "emnist" else first[0] == ends[0]
    return Check(said, holds, f"best at eps = {first[0]}", task)


STUDY = Study(
    name="epsilon-table",
    title="Table 4: training accuracy of FedExP by eps",
    needs="a GPU",
    rounds=500,
    seeds=dict.fromkeys(measures.SEEDS, 1),
    arms=arms,
    measure=measure,
    remarks=(
        "the paper states no number of seeds for this table; 1 is taken",
        "the released code multiplies eps by the number of participants: see --mode authors-code",
    ),
)
