"""Figure 1: FedAvg on EMNIST over a grid of server and client step sizes.

Settings: docs/paper.md#step-size-grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedexp.analysis.plots import entitle, label, new_figure
from fedexp.reproduce.measures import final, grouped, on_common_seeds, seeds_of
from fedexp.reproduce.output import figure_title
from fedexp.reproduce.published import (
    Column,
    Line,
    Table,
    Value,
    best,
    claims,
    quantity,
    study_fields,
)
from fedexp.reproduce.study import Arm, Check, Findings, Plan, Result, Study, check
from fedexp.runs.spec import Outcome
from fedexp.tuning.results import SYMBOLS, draw_heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERVER = ("0.1", "0.3", "1", "3", "10")
CLIENT = ("0.01", "0.03", "0.1", "0.3", "1")
BEST = "1, 0.3"
ACCURACY = "test accuracy"
COLUMNS = (Column(ACCURACY, "%", "figure1"),)


def cell(server: str, client: str) -> str:
    """Return the name of a cell's series."""
    return f"{server}, {client}"


def arms(task: str) -> list[Arm]:
    """Return the 25 cells."""
    return [
        Arm(cell(server, client), "fedavg", (("server.lr", server), ("local.lr", client)))
        for server in SERVER
        for client in CLIENT
    ]


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Return the final test accuracy of each cell; one that diverged has none."""
    runs = grouped(results)["emnist"]
    values = {name: final(own, "test_accuracy") for name, own in runs.items()}
    lines = tuple(Line("emnist", name, {ACCURACY: value}) for name, value in values.items())
    table = Table(COLUMNS, lines, "server step, client step")
    return Findings(table, _checks(runs), lambda: _draw(plan, values))


def _checks(runs: Mapping[str, Sequence[Outcome]]) -> tuple[Check, ...]:
    common = on_common_seeds(runs)
    seeds = seeds_of(common)
    values = {name: final(own, "test_accuracy") for name, own in common.items() if own}
    if not values:
        return _undecided("no seed in common", seeds)
    first = best(values, lowest=False)
    smallest = {name: values[name] for name in (cell(server, CLIENT[0]) for server in SERVER)}
    best_of_smallest = best(smallest, lowest=False)
    if first is None or best_of_smallest is None:
        return _undecided("no number", seeds)
    top, low = values[first].mean or 0.0, smallest[best_of_smallest].mean or 0.0
    seen = f"{low:.1f}% at best with {CLIENT[0]}, {top:.1f}% overall"
    return (
        check("figure1", "best", first == BEST, f"{first} with {top:.1f}%", seeds),
        check("figure1", "compensate", low < top, seen, seeds),
    )


def _undecided(seen: str, seeds: int) -> tuple[Check, ...]:
    return tuple(Check(each, None, seen, seeds=seeds) for each in claims("figure1"))


def _draw(plan: Plan, values: Mapping[str, Value]) -> Figure:
    figure, panels = new_figure(2, width=4.4, height=4.0)
    published = quantity("figure1").values["emnist"]
    for axes, own, title in zip(
        panels, (values, published), ("ours", "the paper's (approximate)"), strict=True
    ):
        grid = np.array([[_fraction(own.get(cell(s, c))) for c in CLIENT] for s in SERVER])
        draw_heatmap(
            axes, list(map(float, CLIENT)), list(map(float, SERVER)), grid, "test_accuracy"
        )
        label(axes, SYMBOLS["local.lr"], SYMBOLS["server.lr"], title)
    entitle(figure, figure_title(plan))
    return figure


def _fraction(value: Value | None) -> float:
    return float("nan") if value is None or value.mean is None else value.mean / 100


STUDY = Study(**study_fields("figure1"), arms=arms, measure=measure)
