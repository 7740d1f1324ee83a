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
from fedexp.reproduce.published import Column, Line, Table, Value, claim, difference, study_fields
from fedexp.reproduce.study import Arm, Check, Findings, Plan, Result, Study, check
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK, LAST = "cifar10-cnn", 10
SERIES = {1: "last iterate", 2: "mean of the last two"}
ACCURACY, CHANGE = f"training accuracy (last {LAST} rounds)", "mean change per round"
CLAIMS = ("steadier", "higher", "fedavg")
judge = partial(check, "iterate-averaging")
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
    lines = tuple(Line(TASK, name, _values(own)) for name, own in runs.items())
    table = Table(COLUMNS, lines, "algorithm and iterate")
    return Findings(table, _checks(on_common_seeds(runs)), lambda: _draw(plan, results))


def _values(runs: Sequence[Outcome]) -> dict[str, Value]:
    metric = "train_accuracy"
    return {ACCURACY: final(runs, metric, LAST), CHANGE: roughness(runs, metric)}


def _checks(runs: Mapping[str, Sequence[Outcome]]) -> tuple[Check, ...]:
    seeds = seeds_of(runs)
    if not seeds:
        return tuple(judge(key, None, "no seed in common", seeds) for key in CLAIMS)
    values = {name: _values(own) for name, own in runs.items()}
    last, both = (
        {name: values[_series(name, iterates)] for name in ("fedexp", "fedavg")}
        for iterates in SERIES
    )
    one, two = last["fedexp"][CHANGE].mean, both["fedexp"][CHANGE].mean
    ours, theirs = (difference(both[n][ACCURACY], last[n][ACCURACY]) for n in last)
    if one is None or two is None or ours is None or theirs is None:
        return tuple(judge(key, None, "no number", seeds) for key in CLAIMS)
    steady = f"changes by {two:.2f} instead of {one:.2f} points per round"
    higher = ours >= claim(STUDY.name, "higher").threshold
    return (
        judge("steadier", two < one, steady, seeds),
        judge("higher", higher, f"{ours:+.2f} points", seeds),
        judge("fedavg", abs(theirs) < abs(ours), f"{theirs:+.2f} points", seeds),
    )


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


STUDY = Study(**study_fields("iterate-averaging"), arms=arms, measure=measure)
