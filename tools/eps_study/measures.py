"""The measures of the study: rounds to target, the oracle, geometric means, and the decision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from tools.eps_study.curves import Key, Store, load
from tools.eps_study.protocol import (
    CANDIDATES,
    FEDEXP,
    MOST_TO_FEDAVG,
    MOST_TO_ORACLE,
    MOST_TO_PRINTED,
    PRINTED_EPS,
    TASKS,
    VARIANT_CONSTANT,
    VARIANT_TASKS,
    Arm,
    Cell,
)

Crossing = Literal["first", "smoothed"]
FEDAVG = Arm("fedavg")
EMNIST_RUNS = len(TASKS["emnist"].cells) * len(TASKS["emnist"].seeds)  # of each arm
LEAST_CIFAR10_CELLS = 2
INTERPOLATES = "synthetic"  # one model fits all clients: eps 0 is right there


def load_all(folder: Path, variant: str = FEDEXP) -> Store:
    """Return the stored runs of all tasks."""
    return {key: run for name in TASKS for key, run in load(name, folder, variant).items()}


@dataclass(frozen=True)
class CellRounds:
    """The mean rounds over seeds of the arms of a cell.

    Attributes:
        cell: the cell.
        rounds: by arm; a seed that does not reach the target counts with the budget.
        missed: by arm, the number of seeds that do not reach it.
        seeds: the seeds that all arms have.
    """

    cell: Cell
    rounds: dict[Arm, float]
    missed: dict[Arm, int]
    seeds: tuple[int, ...]

    @cached_property
    def oracle(self) -> Arm:
        """The absolute eps with the fewest rounds; of equal ones the smallest."""
        absolute = [arm for arm in self.rounds if arm.kind == "absolute"]
        return min(absolute, key=lambda arm: (self.rounds[arm], arm.eps))

    @property
    def at_edge(self) -> bool:
        """Whether the best absolute eps is the largest, or the smallest and not 0.

        Where several are best, it is at an edge only if all of them are.
        """
        least = self.rounds[self.oracle]
        values = sorted(arm.eps for arm in self.rounds if arm.kind == "absolute")
        best = [a.eps for a, n in self.rounds.items() if a.kind == "absolute" and n == least]
        edges = {values[-1], *(value for value in values[:1] if value > 0)}
        return set(best) <= edges


def cell_rounds(store: Store, cell: Cell, crossing: Crossing) -> CellRounds | None:
    """Return the rounds of a cell over the seeds of which all arms are stored; None if none is."""
    study = TASKS[cell.task]
    relative = {
        key.arm for key in store if key.cell.task == cell.task and key.arm.kind == "relative"
    }
    arms = study.arms(cell, sorted(arm.eps for arm in relative))
    seeds = [s for s in study.seeds if all(Key(cell, s, arm) in store for arm in arms)]
    if not seeds or not relative:
        return None
    index = 0 if crossing == "first" else 1
    hits = {
        arm: [store[Key(cell, seed, arm)].crossings(study)[index] for seed in seeds] for arm in arms
    }
    return CellRounds(
        cell,
        {arm: sum(h or study.budget for h in own) / len(seeds) for arm, own in hits.items()},
        {arm: own.count(None) for arm, own in hits.items()},
        tuple(seeds),
    )


def task_cells(store: Store, names: Iterable[str], crossing: Crossing) -> list[CellRounds]:
    """Return the complete cells of some tasks."""
    cells = (cell_rounds(store, cell, crossing) for name in names for cell in TASKS[name].cells)
    return [cell for cell in cells if cell is not None]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> round(geometric_mean([1.0, 4.0]), 6)
    2.0
    """
    return math.exp(sum(map(math.log, values)) / len(values))


def to_oracle(cells: Sequence[CellRounds], arm: Arm) -> float | None:
    """Return the geometric mean of an arm's rounds over the oracle's; None without cells."""
    return to_arm(cells, arm, None)


def to_fedavg(cells: Sequence[CellRounds], arm: Arm) -> float | None:
    """Return the geometric mean of an arm's rounds over FedAvg's; None without cells."""
    return to_arm(cells, arm, FEDAVG)


def to_arm(cells: Sequence[CellRounds], arm: Arm, other: Arm | None) -> float | None:
    """Return the geometric mean of an arm's rounds over another's, None for the oracle's."""
    ratios = [c.rounds[arm] / c.rounds[other or c.oracle] for c in cells if arm in c.rounds]
    return geometric_mean(ratios) if ratios else None


def selection_tasks() -> list[str]:
    return [name for name, task in TASKS.items() if task.selects]


def confirmation_tasks() -> list[str]:
    return [name for name, task in TASKS.items() if not task.selects]


def selected(store: Store, names: Sequence[str] | None = None) -> float | None:
    """Return the constant with the least loss on the selection tasks; None while runs are missing.

    Args:
        store: the stored runs.
        names: other tasks to select on, which must be complete as well.
    """
    names = selection_tasks() if names is None else names
    cells = task_cells(store, names, "smoothed")
    if len(cells) < sum(len(TASKS[name].cells) for name in names):
        return None
    losses = {c: to_oracle(cells, Arm("relative", c)) for c in CANDIDATES}
    known = {c: loss for c, loss in losses.items() if loss is not None}
    return min(known, key=lambda c: (known[c], -c)) if known else None


def constants(store: Store) -> tuple[float, ...]:
    """Return the constants that are run on confirmation tasks; none while runs are missing.

    The first is the selected one, which the decision is about; the second is the one that is
    selected without the synthetic problem, if it is another one (the amendment of the protocol).
    """
    others = [name for name in selection_tasks() if name != INTERPOLATES]
    found = [selected(store), selected(store, others)]
    return tuple(dict.fromkeys(c for c in found if c is not None)) if found[0] else ()


class Verdict(NamedTuple):
    """The criteria on one task: geometric means of rounds over those of other arms.

    Attributes:
        oracle: over the oracle's.
        fedavg: over those without extrapolation.
        printed: of a variant, over those of the printed default, an absolute eps; None where that
            is not an arm of every cell.
        holds: whether the criteria are at most what the protocol states; the second one is about
            `printed` for a variant, else about `fedavg`.
    """

    oracle: float
    fedavg: float
    printed: float | None
    holds: bool


def verdicts(
    store: Store,
    names: Iterable[str],
    constant: float,
    crossing: Crossing = "smoothed",
    printed: Arm | None = None,
) -> dict[str, Verdict]:
    """Return the criteria on each of some tasks that has complete cells.

    Args:
        store: the stored runs.
        names: the tasks.
        constant: the relative eps.
        crossing: which rounds to the target count.
        printed: the default that a variant had before; None for FedExP.
    """
    arm, found = Arm("relative", constant), {}
    for name in names:
        cells = task_cells(store, [name], crossing)
        oracle, fedavg = to_oracle(cells, arm), to_fedavg(cells, arm)
        if oracle is None or fedavg is None:
            continue
        everywhere = printed is not None and all(printed in cell.rounds for cell in cells)
        over = to_arm(cells, arm, printed) if everywhere else None
        is_fast = fedavg <= MOST_TO_FEDAVG if printed is None else (over or 0.0) <= MOST_TO_PRINTED
        found[name] = Verdict(oracle, fedavg, over, oracle <= MOST_TO_ORACLE and is_fast)
    return found


def decision(store: Store, constant: float) -> bool | None:
    """Return whether the relative form becomes the default; None while the study is open."""
    emnist, cifar10 = (task_cells(store, [name], "smoothed") for name in ("emnist", "cifar10"))
    if sum(len(cell.seeds) for cell in emnist) < EMNIST_RUNS or len(cifar10) < LEAST_CIFAR10_CELLS:
        return None
    judged = verdicts(store, confirmation_tasks(), constant)
    return all(verdict.holds for verdict in judged.values())


def variant_verdicts(store: Store, crossing: Crossing = "smoothed") -> dict[str, Verdict]:
    """Return the criteria on each task of a variant that has complete cells."""
    return verdicts(store, TASKS, VARIANT_CONSTANT, crossing, Arm("absolute", PRINTED_EPS))


def variant_decision(store: Store) -> bool | None:
    """Return whether the relative form becomes a variant's default; None while runs are missing."""
    for name in VARIANT_TASKS:
        cells = task_cells(store, [name], "smoothed")
        if [cell.seeds for cell in cells] != [TASKS[name].seeds] * len(TASKS[name].cells):
            return None
    return all(verdict.holds for verdict in variant_verdicts(store).values())
