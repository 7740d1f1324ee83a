"""What is stored of the runs, and what is measured in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.grid import read_csv, write_csv
from tools.outer_study.protocol import (
    ADAM_LRS,
    BASE,
    CONSTANTS,
    LOCAL_LRS,
    RULES,
    SEEDS,
    Cell,
    Chunks,
    Key,
)

FILE = "runs.csv"
HEADERS = ("workers", "inner_steps", "chunks", "rule", "local_lr", "seed")


class Curves(NamedTuple):
    """A run.

    Attributes:
        losses: the test loss at each evaluation; infinite after a divergence.
        steps: the server step size of every round.
        machine: device, precision and version of torch.
    """

    losses: tuple[float, ...]
    steps: tuple[float, ...]
    machine: str

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], machine: str) -> Curves:
        """Return what is stored of the rows of a run, with five digits."""
        evaluated = [row for row in rows if "test_loss" in row and row["test_loss"] is not None]
        losses = tuple(float(f"{row['test_loss']:.5g}") for row in evaluated)
        steps = tuple(float(f"{row['server_lr']:.4g}") for row in rows)
        return cls(losses, steps, machine)

    @property
    def final(self) -> float:
        """The final test loss, in nats per character."""
        return self.losses[-1]

    @property
    def mean_step(self) -> float:
        """The geometric mean of the server step sizes."""
        return math.exp(np.mean(np.log(self.steps)))


Store = Mapping[Key, Curves]


def load(folder: Path) -> dict[Key, Curves]:
    """Return the stored runs; none without the file."""
    runs = {}
    for row in read_csv(folder / FILE):
        chunks: Chunks = "random" if row["chunks"] == "random" else "contiguous"
        cell = Cell(int(row["workers"]), int(row["inner_steps"]), chunks)
        key = Key(cell, row["rule"], float(row["local_lr"]), int(row["seed"]))
        losses, steps = (tuple(map(float, row[name].split())) for name in ("losses", "steps"))
        runs[key] = Curves(losses, steps, row["machine"])
    return runs


def store(folder: Path, runs: Store) -> None:
    """Write all runs."""
    lines = (
        (*key.cell, key.rule, key.local_lr, key.seed, run.machine, *map(_text, run[:2]))
        for key, run in runs.items()
    )
    write_csv(folder / FILE, (*HEADERS, "machine", "losses", "steps"), lines)


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def best_local_lr(runs: Store) -> float:
    """Return the inner learning rate with the lowest mean loss of step 1 over `BASE`."""

    def loss(lr: float) -> float:
        keys = [Key(cell, "step 1", lr, SEEDS[0]) for cell in BASE]
        return float(np.mean([runs[key].final for key in keys]))

    return min(LOCAL_LRS, key=loss)


def best_rules(runs: Store) -> list[str]:
    """Return the rules, of FedAdam the one whose learning rate is best in the first cell."""
    adams = [f"fedadam {lr:g}" for lr in ADAM_LRS]
    best = min(adams, key=lambda rule: min(own_losses(runs, rule).values()))
    return [rule for rule in RULES if rule == best or rule not in adams]


def own_losses(runs: Store, rule: str) -> dict[float, float]:
    """Return the final losses of a rule in the first cell, by inner learning rate."""
    return {lr: runs[Key(BASE[0], rule, lr, SEEDS[0])].final for lr in LOCAL_LRS}


def best_step(runs: Store, cell: Cell, local_lr: float, seed: int) -> float:
    """Return the best constant step: the lowest point of a parabola through the best of the grid
    and its neighbours, over the logarithm of the step; an end of the grid where that is best."""
    losses = [runs[Key(cell, f"step {c:g}", local_lr, seed)].final for c in CONSTANTS]
    at = int(np.argmin(losses))
    if at in (0, len(CONSTANTS) - 1):
        return CONSTANTS[at]
    near = slice(at - 1, at + 2)
    square, slope, _ = np.polyfit(np.log(CONSTANTS[near]), losses[near], 2)
    return math.exp(-slope / (2 * square))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank.

    >>> rank_correlation([(1, 10), (2, 20), (3, 30)])
    1.0
    """
    first, second = (_ranks(values) for values in zip(*pairs, strict=True))
    return float(np.round(np.corrcoef(first, second)[0, 1], 12))


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [b + (e - 1) / 2 for b, e in zip(below, equal, strict=True)]
