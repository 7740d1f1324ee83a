"""What a client that lies about its squared norm does to a secure run: results/untrusted/lies.csv.

    python -m tools.untrusted.lies

Ten clients, all in every round, on the digits with a hidden layer; updates are clipped as the mod
of secure aggregation does. The first client trains honestly and claims another squared norm: the
clip squared, or twice that, the largest claim that a payload takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

import fedexp as fx
from fedexp.aggregate import norms
from fedexp.clipping import clip
from fedexp.engine.base import Run, Sums
from fedexp.engine.plan import Work
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from tools.grid import RESULTS, read_csv, write_csv

FILE = RESULTS / "untrusted" / "lies.csv"
SEEDS, CLIPS, CLAIMS, MOST_STEPS = range(5), (2.0, 10.0, 100.0), (0.0, 1.0, 2.0), (2.0, np.inf)
ROUNDS, LAST = 60, 10
HEADERS = ("clip", "claim", "max_step", "seed", "accuracy", "longest_step")


@dataclass
class Lying(ProcessGroup):
    """Clips updates, and replaces the squared norm of client 0 by a multiple of the clip's."""

    clip: float
    claim: float

    def engine(self, engine: Any) -> Run:
        return partial(self._run, engine)

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        mod: Any = self
        sums, changed = engine(replace(work, privacy=mod), state)
        lie = self.claim * self.clip**2 - self.true if self.claim else 0.0
        return replace(sums, sq_norm=sums.sq_norm + lie), changed

    def bits(self, deltas: Tensor) -> dict[str, Tensor]:
        """Return nothing: the clip is constant."""
        return {}

    def protected(self, deltas: Tensor, clients: Sequence[int], round: int) -> Tensor:
        """Return the updates clipped; keep the squared norm of client 0."""
        deltas = clip(deltas, self.clip)
        self.true = float(norms(deltas[clients.index(0)][None]).square())
        return deltas


def run(bound: float, claim: float, most: float, seed: int) -> tuple[float, float]:
    """Return the accuracy in percent, a mean over the last rounds, and the longest step."""
    task = fx.tasks.digits("mlp", clients=10, alpha=0.3)
    records = [
        (100 * (record.test_accuracy or 0.0), record.server_lr or 0.0)
        for record in fx.simulate(
            task,
            fx.fedexp(max_step=most),
            ROUNDS,
            "all",
            seed,
            local=replace(task.local, lr=0.1),
            evaluate_every=(ROUNDS, LAST),
            engine="batched",
            process_group=Lying(bound, claim),
        )
    ]
    accuracies, steps = zip(*records, strict=True)
    return float(np.mean(accuracies[-LAST:])), max(steps)


def table() -> str:
    """Return the table of docs/untrusted-clients.md: means over the seeds, and their range."""
    cells: dict[tuple[str, ...], list[float]] = {}
    for row in read_csv(FILE):
        key = row["clip"], row["max_step"], row["claim"]
        cells.setdefault(key, []).append(float(row["accuracy"]))
    lines = [
        "| clip | max_step | honest | claims clip² | claims 2 clip² |",
        "|---|---|---:|---:|---:|",
    ]
    for bound, most in product(CLIPS, MOST_STEPS):
        shown = []
        for claim in CLAIMS:
            values = cells[f"{bound:g}", f"{most:g}", f"{claim:g}"]
            shown.append(f"{np.mean(values):.1f} ({min(values):.0f}-{max(values):.0f})")
        lines.append(f"| {bound:g} | {most:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    lines = []
    for bound, claim, most, seed in product(CLIPS, CLAIMS, MOST_STEPS, SEEDS):
        accuracy, longest = run(bound, claim, most, seed)
        numbers = f"{bound:g}", f"{claim:g}", f"{most:g}", seed, f"{accuracy:.2f}", f"{longest:.2f}"
        lines.append(numbers)
        print(*numbers, flush=True)
    write_csv(FILE, HEADERS, lines)
    print(table())


if __name__ == "__main__":
    main()
