"""The tables of docs/untrusted-clients.md from results/untrusted/runs.csv, and its criteria."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

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
