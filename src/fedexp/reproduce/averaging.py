"""Figure 6: the last iterate against the mean of the last two, for FedAvg and FedExP.

Settings: docs/paper.md#averaging-study. The output model: docs/paper.md#output-model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fedexp.analysis.plots import entitle, label, new_figure
from fedexp.reproduce.measures import final, grouped, on_common_seeds, roughness, seeds_of
from fedexp.reproduce.output import draw_panel, figure_title
from fedexp.reproduce.published import Column, Line, Table, claim
from fedexp.reproduce.study import Arm, Check, Findings, Plan, Result, Study
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK, LAST = "cifar10-cnn", 10
SERIES = {1: "last iterate", 2: "mean of the last two"}
ACCURACY, CHANGE = f"training accuracy (last {LAST} rounds)", "mean change per round"
CLAIMS = ("steadier", "higher", "fedavg")
COLUMNS = (Column(ACCURACY, "%"), Column(CHANGE, "%"))


def arms(task: str) -> list[Arm]:
    """Return each algorithm twice: the rounds are the same, the evaluated model differs."""
    return [
        Arm(_series(name, iterates), name, (("average_last", str(iterates)),))
        for name in ("fedavg", "fedexp")
        for iterates in SERIES
    ]


def _series(algorithm: str, iterates: int) -> str:
    return f"{algorithm}, {SERIES[iterates]}"


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Return the final accuracy of each curve, and its mean change from round to round."""
    runs = grouped(results)[TASK]
    table = Table(COLUMNS, _lines(runs), "algorithm and iterate")
    return Findings(table, _checks(on_common_seeds(runs)), lambda: _draw(plan, results))


def _lines(runs: Mapping[str, Sequence[Outcome]]) -> tuple[Line, ...]:
    return tuple(
        Line(
            TASK,
            name,
            {
                ACCURACY: final(own, "train_accuracy", LAST),
                CHANGE: roughness(own, "train_accuracy"),
            },
        )
        for name, own in runs.items()
        if own
    )


def _checks(runs: Mapping[str, Sequence[Outcome]]) -> tuple[Check, ...]:
    judge = partial(_check, seeds_of(runs))
    lines = _lines(runs)
    if not lines:
        return tuple(judge(key, None, "no seed in common") for key in CLAIMS)
    ends = {line.series: line.values[ACCURACY].mean for line in lines}
    change = {line.series: line.values[CHANGE].mean for line in lines}
    one, two = (change[_series("fedexp", iterates)] for iterates in SERIES)
    gains = {name: _gain(ends, name) for name in ("fedexp", "fedavg")}
    ours, theirs = gains["fedexp"], gains["fedavg"]
    if one is None or two is None or ours is None or theirs is None:
        return tuple(judge(key, None, "no number") for key in CLAIMS)
    steady = f"changes by {two:.2f} instead of {one:.2f} points per round"
    return (
        judge("steadier", two < one, steady),
        judge("higher", ours >= claim(STUDY.name, "higher").threshold, f"{ours:+.2f} points"),
        judge("fedavg", abs(theirs) < abs(ours), f"{theirs:+.2f} points"),
    )


def _gain(ends: dict[str, float | None], algorithm: str) -> float | None:
    last, mean = (ends[_series(algorithm, iterates)] for iterates in SERIES)
    return None if last is None or mean is None else mean - last


def _check(seeds: int, key: str, holds: bool | None, seen: str) -> Check:
    return Check(claim(STUDY.name, key), holds, seen, seeds=seeds)


def _draw(plan: Plan, results: Sequence[Result]) -> Figure:
    runs = grouped(results)[TASK]
    figure, axes = new_figure(2)
    for panel, name in zip(axes, ("fedavg", "fedexp"), strict=True):
        own = {text: runs[_series(name, iterates)] for iterates, text in SERIES.items()}
        draw_panel(panel, own, "train_accuracy")
        label(panel, "round", "training accuracy", name)
        panel.legend(frameon=False, fontsize=9)
    entitle(figure, figure_title(plan))
    return figure


STUDY = Study(
    name="iterate-averaging",
    title="Figure 6: the last iterate and the mean of the last two, a CNN on CIFAR-10",
    needs="a GPU",
    rounds=500,
    seeds={TASK: 1},
    arms=arms,
    measure=measure,
    least_arms=4,
    evaluate_every=1,
    remarks=(
        "the paper draws curves and prints no number; it states neither rounds, seeds nor step "
        "sizes; 500 rounds, 1 seed and the best values of CIFAR-10 are taken",
    ),
)
