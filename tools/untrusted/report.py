"""The tables of docs/untrusted-clients.md from results/untrusted/runs.csv, and its criteria."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedexp.analysis.plots import COLOURS, label, new_figure, save
from tools.untrusted.protocol import (
    ATTACKS,
    BOUNDS,
    LEAST_REGAINED,
    MANY,
    MOST_COST,
    MOST_HARM,
    MOST_LOSS,
    PROTECTIONS,
    SEVERE,
    SHARES,
    STOPPED,
    TASKS,
)

Row = Mapping[str, str]
DRAWN = {  # protections of the picture, with colour and marker
    "FedAvg": (COLOURS["fedavg"][0], "o"),
    "FedExP": (COLOURS["fedexp"][0], "o"),
    "FedExP, bound 2": ("#882255", "v"),
    "FedExP, bound 3": ("#882255", "s"),
    "FedExP, bound 5": ("#882255", "^"),
    "FedMedian": ("#7F7F7F", "x"),
    "FedTrimmedAvg": ("#7F7F7F", "+"),
    "Krum": ("#7F7F7F", "1"),
}
Cell = tuple[str, str, float, str]  # task, attack, share, protection


def accuracies(rows: Iterable[Row]) -> dict[Cell, list[float]]:
    """Return the final accuracies of each cell, one per seed; 0 for a run that diverged."""
    cells: dict[Cell, list[float]] = defaultdict(list)
    for row in rows:
        value = 0.0 if row["diverged"] else float(row["accuracy"])
        cells[row["task"], row["attack"], float(row["share"]), row["protection"]].append(value)
    return cells


def tables(rows: Iterable[Row]) -> str:
    """Return the tables, one per task, and whether each bound meets the criteria."""
    cells = accuracies(rows)
    tasks = [task for task in TASKS if any(cell[0] == task for cell in cells)]
    return "\n\n".join([*(_table(task, cells) for task in tasks), *verdicts(cells, tasks)])


def _table(task: str, cells: Mapping[Cell, list[float]]) -> str:
    lines = [
        f"**{task}**, final accuracy in %, mean and range of {_seeds(task, cells)} seeds",
        "",
        f"| attack | {' | '.join(PROTECTIONS)} |",
        f"|---|{'---:|' * len(PROTECTIONS)}",
    ]
    for attack in ATTACKS:
        for share in SHARES if attack in MANY else SHARES[:1]:
            label = attack if attack == "none" else f"{attack}, {share:.0%}"
            values = [cells.get((task, attack, share, name), []) for name in PROTECTIONS]
            lines.append(f"| {label} | {' | '.join(map(_shown, values))} |")
    return "\n".join(lines)


def draw(task: str, rows: Iterable[Row], path: Path) -> None:
    """Draw the final accuracies of a task under each attack, mean and range over the seeds."""
    cells = accuracies(rows)
    figure, (axes,) = new_figure(1, width=9, height=6)
    lines = [
        (attack, share)
        for attack in ATTACKS
        for share in (SHARES if attack in MANY else SHARES[:1])
    ]
    for number, (name, (colour, marker)) in enumerate(DRAWN.items()):
        places = np.arange(len(lines)) + (number - len(DRAWN) / 2) / (1.4 * len(DRAWN))
        values = [cells[task, attack, share, name] for attack, share in lines]
        means, bounds = map(np.mean, values), [(min(v), max(v)) for v in values]
        axes.hlines(places, *zip(*bounds, strict=True), color=colour, linewidth=1)
        axes.plot(list(means), places, marker, color=colour, label=name, markersize=6)
    labels = [a if a == "none" else f"{a}, {share:.0%} of clients" for a, share in lines]
    axes.set_yticks(range(len(lines)), labels)
    axes.invert_yaxis()
    label(axes, "final accuracy in %", "", f"Attacks on {task}: mean and range over the seeds")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(figure, path)


def _seeds(task: str, cells: Mapping[Cell, list[float]]) -> int:
    return max((len(values) for cell, values in cells.items() if cell[0] == task), default=0)


def _shown(values: list[float]) -> str:
    if not values:
        return ""
    return f"{np.mean(values):.1f} ({min(values):.0f}-{max(values):.0f})"


def verdicts(cells: Mapping[Cell, list[float]], tasks: Sequence[str]) -> list[str]:
    """Return, for each bound, its largest honest cost, loss and harm over the tasks that ran."""
    lines = []
    for bound in BOUNDS:
        name = f"FedExP, bound {bound:g}"

        def mean(task: str, attack: str, rule: str) -> float:
            return float(np.mean(cells.get((task, attack, SHARES[0], rule), [np.nan])))

        cost = {task: mean(task, "none", "FedExP") - mean(task, "none", name) for task in tasks}
        loss = {
            (task, attack): mean(task, "none", name) - mean(task, attack, name)
            for task in tasks
            for attack in STOPPED
        }
        harm = {
            (task, attack): mean(task, attack, "FedExP") - mean(task, attack, name)
            for task in tasks
            for attack in ATTACKS
        }
        regained = {
            (task, attack): 1 - loss[task, attack] / lost
            for task, attack in loss
            if (lost := mean(task, "none", "FedExP") - mean(task, attack, "FedExP")) >= SEVERE
        }
        worst = [max(values.items(), key=lambda item: item[1]) for values in (cost, loss, harm)]
        met = [
            value <= most
            for (_, value), most in zip(worst, (MOST_COST, MOST_LOSS, MOST_HARM), strict=True)
        ]
        parts = ", ".join(
            f"{what} {value:.1f} ({where if isinstance(where, str) else ', '.join(where)})"
            for what, (where, value) in zip(("cost", "loss", "harm"), worst, strict=True)
        )
        least = min(regained.values(), default=0.0)
        free = met[0] and met[2] and least >= LEAST_REGAINED
        lines.append(
            f"bound {bound:g}: {'meets' if all(met) else 'fails'} the criteria: {parts}; of severe "
            f"attacks it regains {least:.0%} at least: {'meets' if free else 'fails'} the amendment"
        )
    return lines
