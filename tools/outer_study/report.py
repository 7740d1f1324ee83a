"""The tables and the figure of docs/outer-optimisers.md, a function of the stored runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedexp.analysis.plots import entitle, label, new_figure
from tools.outer_study.measures import (
    Store,
    best_local_lr,
    best_rules,
    best_step,
    load,
    own_losses,
    rank_correlation,
)
from tools.outer_study.protocol import (
    BASE,
    CELLS,
    CONSTANTS,
    MARGIN,
    RULES,
    SEEDS,
    STEPS,
    Cell,
    Key,
    judged,
    tuning,
)
from tools.results.format import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "figure.svg"
FREE = "fedexp unclamped"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks by name; a line where the runs for one are not complete.

    Args:
        folder: of the CSV file.
    """
    runs = load(folder)
    left = f"Not complete: {len(runs)} runs are stored."
    blocks = dict.fromkeys(("outer-tuning", *MAKES), left)
    if runs:
        blocks["outer-tuning"] = own_rates(runs)
    if is_complete(runs):
        blocks |= {name: make(runs, best_local_lr(runs)) for name, make in MAKES.items()}
    return blocks


def is_complete(runs: Store) -> bool:
    """Return whether all runs of the protocol are stored."""
    if not {*tuning()} <= runs.keys():
        return False
    return {*judged(best_rules(runs), best_local_lr(runs))} <= runs.keys()


def _name(cell: Cell) -> list[str]:
    return [str(cell.workers), str(cell.inner_steps), cell.chunks]


def cells(runs: Store, lr: float) -> str:
    """Return final test losses of the first seed in every cell; the lowest are bold."""
    rules, lines = best_rules(runs), []
    for cell in CELLS:
        losses = [runs[Key(cell, rule, lr, SEEDS[0])].final for rule in rules]
        shown = [f"**{x:.3f}**" if x == min(losses) else f"{x:.3f}" for x in losses]
        lines.append([*_name(cell), *shown])
    return table(["workers", "inner steps", "chunks", *rules], lines, left=3)


def own_rates(runs: Store) -> str:
    """Return the final losses of every rule in the first cell, by inner learning rate."""
    rates = sorted({key.local_lr for key in runs if key in {*tuning()} and key.cell == BASE[0]})
    losses = {
        rule: [runs[Key(BASE[0], rule, lr, SEEDS[0])].final for lr in rates] for rule in RULES
    }
    lowest = [min(column) for column in zip(*losses.values(), strict=True)]
    lines = [
        [
            rule,
            *(
                f"**{x:.3f}**" if x == low else f"{x:.3f}"
                for x, low in zip(row, lowest, strict=True)
            ),
        ]
        for rule, row in losses.items()
    ]
    return table(["rule", *(f"inner rate {lr:g}" for lr in rates)], lines)


def base(runs: Store, lr: float) -> str:
    """Return losses over all seeds, and those with a rule's own inner learning rate."""
    lines = []
    for rule in best_rules(runs):
        line = [rule]
        for cell in BASE:
            losses = [runs[Key(cell, rule, lr, seed)].final for seed in SEEDS]
            line.append(f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})")
        own = own_losses(runs, rule)
        best = min(own, key=lambda x: own[x])
        lines.append([*line, f"{own[best]:.3f} at {best:g}"])
    headers = [f"{cell.chunks}, rate {lr:g}" for cell in BASE]
    return table(["rule", *headers, f"{BASE[0].chunks}, own rate"], lines)


def pairs(runs: Store, lr: float) -> dict[Cell, tuple[float, float]]:
    """Return the mean unclamped step of FedExP and the best constant step, by cell."""
    return {
        cell: (
            runs[Key(cell, FREE, lr, SEEDS[0])].mean_step,
            best_step(runs, cell, lr, SEEDS[0]),
        )
        for cell in CELLS
    }


def steps(runs: Store, lr: float) -> str:
    """Return predicted and best steps, and what predicted ones cost."""
    lines = []
    for cell, (predicted, best) in pairs(runs, lr).items():
        grid = min(runs[Key(cell, f"step {c:g}", lr, SEEDS[0])].final for c in CONSTANTS)
        loss = runs[Key(cell, FREE, lr, SEEDS[0])].final
        lines.append([*_name(cell), f"{predicted:.2f}", f"{best:.2f}", f"{loss - grid:+.3f}"])
    return table(
        ["workers", "inner steps", "chunks", "unclamped step", "best step", "loss to best"], lines
    )


def answers(runs: Store, lr: float) -> str:
    """Return the answers to the questions of the protocol."""

    def loss(cell: Cell, rule: str) -> float:
        return runs[Key(cell, rule, lr, SEEDS[0])].final

    lines = []
    for number, (what, others) in enumerate(
        (
            ("step 1", ["step 1"]),
            ("the best constant step of the grid", [f"step {c:g}" for c in CONSTANTS]),
            ("Nesterov", ["nesterov"]),
        )
    ):
        gaps = [loss(cell, "fedexp") - min(loss(cell, o) for o in others) for cell in CELLS]
        allowed = MARGIN if number == 1 else 0.0
        good = sum(gap <= allowed if number == 1 else gap < 0 for gap in gaps)
        answer = good > len(gaps) / 2 and (number == 1 or max(gaps) <= MARGIN)
        within = f"within {MARGIN:g} of" if number == 1 else "below"
        lines.append(
            f"- FedExP's loss is {within} that of {what} in {good} of {len(gaps)} cells; the "
            f"difference is {min(gaps):+.3f} to {max(gaps):+.3f}: **{'yes' if answer else 'no'}**."
        )
    correlation = rank_correlation(list(pairs(runs, lr).values()))
    lines.append(
        f"- Rank correlation of the unclamped step with the best constant step over "
        f"{len(CELLS)} cells: {correlation:.2f}: **{'yes' if correlation >= 0.6 else 'no'}**."
    )
    return "\n".join(lines)


MAKES: dict[str, Callable[[Store, float], str]] = {
    "outer-answers": answers,
    "outer-cells": cells,
    "outer-base": base,
    "outer-steps": steps,
}


def figure(folder: Path) -> Figure | None:
    """Draw predicted against best steps, and loss against rounds in the first cells."""
    runs = load(folder)
    if not is_complete(runs):
        return None
    lr, adam = best_local_lr(runs), best_rules(runs)[-1]
    drawn, axes = new_figure(3, width=12, height=4)
    for chunks, marker in (("random", "o"), ("contiguous", "s")):
        chosen = {c: pair for c, pair in pairs(runs, lr).items() if c.chunks == chunks}
        axes[0].plot(*zip(*chosen.values(), strict=True), marker, label=chunks)
        for cell, (predicted, best) in chosen.items():
            axes[0].annotate(f"{cell.workers}/{cell.inner_steps}", (predicted, best), fontsize=7)
    axes[0].plot(CONSTANTS, CONSTANTS, color="grey", linewidth=0.8)
    label(axes[0], "unclamped step of FedExP", "best constant step", "workers / inner steps")
    axes[0].legend(frameon=False)
    for panel, cell in zip(axes[1:], BASE, strict=True):
        for rule in ("step 1", "step 1.4", "nesterov", "fedexp", adam):
            losses = np.array([runs[Key(cell, rule, lr, seed)].losses for seed in SEEDS])
            rounds = np.linspace(0, STEPS // cell.inner_steps, losses.shape[1] + 1)[1:]
            panel.plot(rounds, losses.mean(axis=0), label=rule)
            panel.fill_between(rounds, losses.min(axis=0), losses.max(axis=0), alpha=0.2)
        label(panel, "round", "test loss", f"{cell.workers} workers, {cell.chunks} chunks")
        panel.legend(frameon=False)
    entitle(drawn, "Outer rules for a small GPT")
    return drawn
