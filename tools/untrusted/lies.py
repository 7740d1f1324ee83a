"""What one client does to a secure run: results/untrusted/lies.csv and adaptive.csv.

    python -m tools.untrusted.lies

Ten clients, all in every round, on the digits with a hidden layer; updates are clipped as the mod
of secure aggregation does. The first client trains honestly and claims another squared norm: the
clip squared, or twice that, the largest claim that a payload takes. Or it reverses ten times its
update, where the clip is constant or follows the clients' bits, which it may claim as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import fedexp as fx
from fedexp.aggregate import norms
from fedexp.clipping import LONGER, at_median, clip, follow, length_bits
from fedexp.engine.base import Run, Sums
from fedexp.engine.plan import Work
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from tools.grid import RESULTS, read_csv, write_csv

FILE = RESULTS / "untrusted" / "lies.csv"
SEEDS, CLIPS, CLAIMS, MOST_STEPS = range(5), (2.0, 10.0, 100.0), (0.0, 1.0, 2.0), (2.0, np.inf)
ROUNDS, LAST = 60, 10
HEADERS = ("clip", "claim", "max_step", "seed", "accuracy", "longest_step")
ADAPTIVE = RESULTS / "untrusted" / "adaptive.csv"
BOUNDS = (None, 3.0, 5.0)
ATTACKS = {"none": (1.0, False), "flip x 10": (-10.0, False), "flip x 10, lies": (-10.0, True)}


@dataclass
class Lying(ProcessGroup):
    """Clips updates, and replaces the squared norm of client 0 by a multiple of the clip's.

    Its update is multiplied by `factor`; one that lies claims that all clients are longer than the
    median.
    """

    clip: float
    claim: float = 0.0
    factor: float = 1.0
    lies: bool = False
    bound: float = 1.0

    def engine(self, engine: Any) -> Run:
        return partial(self._run, engine)

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        limits = work.algorithm.limits(state.server)
        mod = at_median(self, limits)
        if limits is not None:
            mod = replace(mod, bound=limits.bound)
        sums, changed = engine(replace(work, privacy=cast(Any, mod), limits=None), state)
        lie = self.claim * self.clip**2 - mod.true if self.claim else 0.0
        extras = {}
        if limits is not None:
            bits = sums.extras[LONGER] / sums.count
            extras = follow(mod.clip / mod.bound, torch.ones(()) if self.lies else bits[0])
        return replace(sums, sq_norm=sums.sq_norm + lie, extras=extras), changed

    def bits(self, deltas: Tensor) -> dict[str, Tensor]:
        """Return the bits of all clients."""
        return {LONGER: length_bits(deltas, self.clip / self.bound)}

    def protected(self, deltas: Tensor, clients: Sequence[int], round: int) -> Tensor:
        """Return the updates clipped; keep the squared norm of client 0."""
        factors = torch.tensor([self.factor if client == 0 else 1.0 for client in clients])
        deltas = clip(factors[:, None] * deltas, self.clip)
        self.true = float(norms(deltas[clients.index(0)][None]).square())
        return deltas


def run(attack: Lying, algorithm: fx.Algorithm, seed: int) -> tuple[float, float]:
    """Return the accuracy in percent, a mean over the last rounds, and the longest step."""
    task = fx.tasks.digits("mlp", clients=10, alpha=0.3)
    records = [
        (100 * (record.test_accuracy or 0.0), record.server_lr or 0.0)
        for record in fx.simulate(
            task,
            algorithm,
            ROUNDS,
            "all",
            seed,
            local=replace(task.local, lr=0.1),
            evaluate_every=(ROUNDS, LAST),
            engine="batched",
            process_group=attack,
        )
    ]
    accuracies, steps = zip(*records, strict=True)
    return float(np.mean(accuracies[-LAST:])), max(steps)


def table(file: Path, rows: Sequence[str], column: str, headings: Mapping[str, str]) -> str:
    """Return a table of docs/untrusted-clients.md: means over the seeds, and their range.

    Args:
        file: with the runs.
        rows: the columns of the file that make a row.
        column: the one whose values make the columns.
        headings: of these columns, by value.
    """
    cells: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for line in read_csv(file):
        cell = cells.setdefault(tuple(line[name] for name in rows), {})
        cell.setdefault(line[column], []).append(float(line["accuracy"]))
    lines = [
        f"| {' | '.join([*rows, *headings.values()])} |",
        f"|{'---|' * len(rows)}{'---:|' * len(headings)}",
    ]
    for names, cell in cells.items():
        values = (cell[value] for value in headings)
        shown = (f"{np.mean(v):.1f} ({min(v):.0f}-{max(v):.0f})" for v in values)
        lines.append(f"| {' | '.join([*names, *shown])} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Return the tables of docs/untrusted-clients.md, by the name of their block."""
    claims = {"0": "honest", "1": "claims clip²", "2": "claims 2 clip²"}
    return {
        "lies": table(FILE, ("clip", "max_step"), "claim", claims),
        "adaptive": table(ADAPTIVE, ("clip", "bound"), "attack", {name: name for name in ATTACKS}),
    }


def main() -> None:
    lines, adaptive = [], []
    for most, bound, claim, seed in product(CLIPS, MOST_STEPS, CLAIMS, SEEDS):
        accuracy, longest = run(Lying(most, claim), fx.fedexp(max_step=bound), seed)
        settings = f"{most:g}", f"{claim:g}", f"{bound:g}"
        lines.append([*settings, seed, f"{accuracy:.2f}", f"{longest:.2f}"])
        print(*lines[-1], flush=True)
    write_csv(FILE, HEADERS, lines)
    for most, medians, attack, seed in product(CLIPS, BOUNDS, ATTACKS, SEEDS):
        factor, lies = ATTACKS[attack]
        algorithm = fx.fedexp(max_step=2.0, bound=medians)
        accuracy, _ = run(Lying(most, factor=factor, lies=lies), algorithm, seed)
        adaptive.append([f"{most:g}", medians or "none", attack, seed, f"{accuracy:.2f}"])
        print(*adaptive[-1], flush=True)
    write_csv(ADAPTIVE, ("clip", "bound", "attack", "seed", "accuracy"), adaptive)
    print("\n\n".join(tables().values()))


if __name__ == "__main__":
    main()
