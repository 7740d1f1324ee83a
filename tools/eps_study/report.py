"""The tables and the figure of the study, as blocks of docs/eps-study.md and docs/extrapolation.md.

All of it is a function of the stored curves. A ratio is the geometric mean over cells of rounds by
the smoothed crossing; the one by the first crossing follows in parentheses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.algorithms import RECOMMENDED_EPS
from fedexp.analysis.plots import entitle, label, new_figure
from tools.eps_study.curves import Store
from tools.eps_study.measures import (
    FEDAVG,
    INTERPOLATES,
    CellRounds,
    Crossing,
    confirmation_tasks,
    constants,
    decision,
    load_all,
    selection_tasks,
    task_cells,
    to_fedavg,
    to_oracle,
    variant_decision,
    variant_verdicts,
    verdicts,
)
from tools.eps_study.protocol import (
    ABSOLUTE,
    CANDIDATES,
    FEDEXP,
    MOST_TO_FEDAVG,
    MOST_TO_ORACLE,
    MOST_TO_PRINTED,
    PRINTED_EPS,
    TASKS,
    VARIANT_CONSTANT,
    VARIANT_TASKS,
    VARIANTS,
    Arm,
    Kind,
)
from tools.results.format import NO_RUNS, bullets, paragraphs, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = "figure.svg"
NAMES = {
    "digits": "digits",
    "digits-mlp": "digits, MLP",
    "synthetic": "synthetic",
    "mnist-200": "MNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR-10",
    "shakespeare": "Shakespeare",
}
ZERO_AT = 1e-5  # where eps 0 is drawn on a log axis
CROSSINGS: tuple[Crossing, ...] = ("smoothed", "first")


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks by name.

    Args:
        folder: where the CSV files of the study are, which may be missing.
    """
    store = load_all(folder)
    variants = {name: load_all(folder, name) for name in VARIANTS if name != FEDEXP}
    return {
        "eps-selection": selection(store),
        "eps-cells": cell_table(store),
        "eps-confirmation": confirmation(store),
        "eps-variants": variant_table(variants),
        "eps-machines": machines([store, *variants.values()]),
        "eps-summary": summary(store),
    }


def selection(store: Store) -> str:
    """Return the loss of each constant on each selection task, and which is chosen."""
    names = selection_tasks()
    groups = {NAMES[name]: [name] for name in names}
    groups["all but synthetic"] = [name for name in names if name != INTERPOLATES]
    groups["all"] = names
    smooth, first = (
        {label: task_cells(store, own, crossing) for label, own in groups.items()}
        for crossing in CROSSINGS
    )
    if not smooth["all"]:
        return NO_RUNS
    arms = [Arm("relative", c) for c in CANDIDATES] + [Arm("absolute", e) for e in ABSOLUTE]
    rows = [
        [
            _arm_name(arm),
            *(_ratio(to_oracle(smooth[own], arm), to_oracle(first[own], arm)) for own in groups),
            _ratio(to_fedavg(smooth["all"], arm), to_fedavg(first["all"], arm)),
        ]
        for arm in [*arms, FEDAVG]
    ]
    headers = ["rounds over the oracle's", *groups, "all, over FedAvg's"]
    return paragraphs(table(headers, rows), _chosen(store))


def _chosen(store: Store) -> str:
    """Return which constant is chosen, what one absolute eps would cost, and what is missing."""
    if not (found := constants(store)):
        return "The selection part is not complete: no constant is chosen."
    lines = []
    others = [name for name in selection_tasks() if name != INTERPOLATES]
    for about, names, constant in (
        ("On all selection tasks", selection_tasks(), found[0]),
        ("Without the synthetic problem", others, found[-1]),
    ):
        cells = task_cells(store, names, "smoothed")
        loss = to_oracle(cells, Arm("relative", constant))
        single, eps = min((to_oracle(cells, Arm("absolute", e)) or 9.0, e) for e in ABSOLUTE)
        lines.append(
            f"{about} ({len(cells)} cells) the constant is **c = {constant:g}**, with {loss:.2f} "
            f"times the oracle's rounds; the best single absolute eps, {eps:.3g}, has {single:.2f} "
            "times."
        )
    for name in selection_tasks():
        seeds = {own.seeds for own in task_cells(store, [name], "smoothed")}
        if seeds != {TASKS[name].seeds}:
            lines.append(f"{NAMES[name]}: not all seeds are run, so the choice is provisional.")
    return bullets(lines)


def cell_table(store: Store) -> str:
    """Return one line per cell: FedAvg, the oracle and the chosen constants."""
    smooth, first = (task_cells(store, TASKS, crossing) for crossing in CROSSINGS)
    arms = [Arm("relative", c) for c in constants(store)]
    if not smooth or not arms:
        return NO_RUNS
    rows = []
    for own, other in zip(smooth, first, strict=True):
        cell = own.cell
        row = [NAMES[cell.task], f"{cell.local_lr:.3g}", str(cell.cohort or "all")]
        row += [str(len(own.seeds)), _rounds(own, FEDAVG, other)]
        row += [f"{own.oracle.eps:.3g}{' (edge)' if own.at_edge else ''}"]
        row += [_rounds(own, own.oracle, other), *(_rounds(own, arm, other) for arm in arms)]
        rows.append(row)
    headers = ["task", "client step", "clients", "seeds", "FedAvg", "best eps", "its rounds"]
    return table([*headers, *map(_arm_name, arms)], rows)


def confirmation(store: Store) -> str:
    """Return the criteria on each confirmation task, and the decision on the first constant."""
    if not (found := constants(store)):
        return NO_RUNS
    rows = []
    for constant in found:
        tasks = confirmation_tasks()
        smooth, first = (verdicts(store, tasks, constant, crossing) for crossing in CROSSINGS)
        for name in tasks:
            row = [f"c = {constant:g}", NAMES[name]]
            if name not in smooth:
                rows.append([*row, "not run yet", "", "", "", ""])
                continue
            cells, own, other = task_cells(store, [name], "smoothed"), smooth[name], first[name]
            seeds = sorted({len(cell.seeds) for cell in cells})
            row += [f"{len(cells)} of {len(TASKS[name].cells)}", " to ".join(map(str, seeds))]
            row += [_ratio(own.oracle, other.oracle), _ratio(own.fedavg, other.fedavg)]
            rows.append([*row, "yes" if own.holds else "no"])
    headers = ["constant", "task", "cells", "seeds", "over the oracle's", "over FedAvg's"]
    rule = f"at most {MOST_TO_ORACLE:g} and {MOST_TO_FEDAVG:g}"
    result = {
        None: f"**Confirmation: not run yet.** c = {found[0]:g} has to have {rule} on each task.",
        True: f"**Confirmed**: c = {found[0]:g} has {rule} on each task.",
        False: f"**Not confirmed**: not {rule} on each task; the printed form stays the default.",
    }
    decided = result[decision(store, found[0])]
    if RECOMMENDED_EPS in found[1:] and decision(store, RECOMMENDED_EPS):
        decided += (
            f" So has c = {RECOMMENDED_EPS:g}, which the package has ([amendment 3](#amendments))."
        )
    return paragraphs(table([*headers, "both criteria"], rows, left=2), decided)


def variant_table(stores: Mapping[str, Store]) -> str:
    """Return the criteria of each variant on each task, and what follows from them."""
    constant, rows, decided = f"c = {VARIANT_CONSTANT:g}", [], []
    rule = f"at most {MOST_TO_ORACLE:g} and {MOST_TO_PRINTED:g} on each task"
    for variant, store in stores.items():
        name = VARIANTS[variant].name
        smooth, first = (variant_verdicts(store, crossing) for crossing in CROSSINGS)
        for task in dict.fromkeys([*VARIANT_TASKS, "emnist", *smooth]):
            if task not in smooth:
                rows.append([name, NAMES[task], "not run yet", *[""] * 4])
                continue
            cells, own, other = task_cells(store, [task], "smoothed"), smooth[task], first[task]
            eps = [cell.oracle.eps for cell in cells]
            row = [name, NAMES[task], f"{min(eps):.3g} to {max(eps):.3g}"]
            row.append(_ratio(own.oracle, other.oracle, MOST_TO_ORACLE))
            row.append(_ratio(own.printed, other.printed, MOST_TO_PRINTED))
            rows.append([*row, _ratio(own.fedavg, other.fedavg), "yes" if own.holds else "no"])
        result = {
            None: f"not all runs are there; {constant} has to have {rule}",
            True: f"**{constant} is the default**: {rule}",
            False: "**the printed form stays the default**: not " + rule,
        }
        decided.append(f"{name}: {result[variant_decision(store)]}.")
    headers = ["variant", "task", "best absolute eps", f"{constant}: rounds over the oracle's"]
    headers += [f"over those of eps = {PRINTED_EPS:g}", "over those without extrapolation"]
    return paragraphs(table([*headers, "both criteria"], rows, left=2), bullets(decided))


def machines(stores: Iterable[Store]) -> str:
    """Return how many runs were executed where."""
    counts = Counter(run.machine for store in stores for run in store.values())
    return "\n".join(f"- {name}: {n} runs" for name, n in sorted(counts.items())) or NO_RUNS


def summary(store: Store) -> str:
    """Return the result of each task, for docs/extrapolation.md."""
    if not (arms := [Arm("relative", c) for c in constants(store)]):
        return NO_RUNS
    rows = []
    for name in [*selection_tasks(), *confirmation_tasks()]:
        cells = task_cells(store, [name], "smoothed")
        row = [NAMES[name], "selection" if TASKS[name].selects else "confirmation"]
        if not cells:
            rows.append([*row, "not run yet", *[""] * (2 * len(arms))])
            continue
        eps = [own.oracle.eps for own in cells]
        ratios = [f"{of(cells, arm):.2f}" for arm in arms for of in (to_oracle, to_fedavg)]
        rows.append([*row, f"{min(eps):.3g} to {max(eps):.3g}", *ratios])
    headers = ["task", "part", "best absolute eps"]
    for arm in arms:
        headers += [f"{_arm_name(arm)}: rounds over the oracle's", "over FedAvg's"]
    return table(headers, rows, left=2)


def figure(folder: Path) -> Figure | None:
    """Draw the loss against c and against the absolute eps, one line per selection task."""
    store = load_all(folder)
    names = [name for name in selection_tasks() if task_cells(store, [name], "smoothed")]
    if not names:
        return None
    drawing, (left, right) = new_figure(2)
    groups = {NAMES[name]: task_cells(store, [name], "smoothed") for name in names}
    groups["all"] = task_cells(store, names, "smoothed")
    panels: tuple[tuple[Axes, Kind, tuple[float, ...]], ...] = (
        (left, "relative", CANDIDATES),
        (right, "absolute", ABSOLUTE),
    )
    ticks = [1, 1.5, 2, 3]
    for axes, kind, values in panels:
        for name, cells in groups.items():
            style = {"color": "black", "linewidth": 2.2} if name == "all" else {"linewidth": 1.2}
            losses = [to_oracle(cells, Arm(kind, value)) or 1.0 for value in values]
            at = [value or ZERO_AT for value in values]
            axes.plot(at, losses, marker="o", markersize=3, label=name, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        label(axes, f"{kind} eps", "rounds over the oracle's", "")
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(0.97, ticks[-1])
        axes.minorticks_off()
    shown = [ZERO_AT, 1e-4, 1e-2, 1.0]
    right.set_xticks(shown, ["0", *(f"{value:g}" for value in shown[1:])])
    left.set_xticks(CANDIDATES, [f"{value:g}" for value in CANDIDATES])
    left.legend(frameon=False, fontsize=8, loc="upper left")
    entitle(drawing, "One value for all cells against the best absolute eps of each")
    return drawing


def _arm_name(arm: Arm) -> str:
    if arm == FEDAVG:
        return "FedAvg"
    return f"c = {arm.eps:g}" if arm.kind == "relative" else f"eps = {arm.eps:.3g}"


def _ratio(smooth: float | None, first: float | None, most: float = math.inf) -> str:
    """Return ratios by both crossings; one just above `most` with a third decimal.

    >>> _ratio(1.2518, 1.19, most=1.25), _ratio(1.2471, 1.19, most=1.25)
    ('1.252 (1.19)', '1.25 (1.19)')
    """
    if smooth is None or first is None:
        return ""
    digits = 3 if smooth > most >= float(f"{smooth:.2f}") else 2
    return f"{smooth:.{digits}f} ({first:.2f})"


def _rounds(own: CellRounds, arm: Arm, first: CellRounds) -> str:
    """Return rounds by both crossings, with how many seeds do not reach the target."""
    more = f", {own.missed[arm]} missed" if own.missed[arm] else ""
    return f"{own.rounds[arm]:.0f} ({first.rounds[arm]:.0f}{more})"
