"""How a round's cost grows with the cohort, with the model and with the federation.

FedExP on an MLP with one hidden layer, 20 steps of batches of 20, generated data, no evaluation.
The rounds of one table take turns, so its ratios hold on a machine that is not quite idle; medians.

    python benchmarks/scaling.py --out benchmarks/records/DATE-cpu-scaling.json   # one thread
    python benchmarks/scaling.py --device cuda --out benchmarks/records/DATE-CARD-scaling.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation
from fedexp.engine import EngineName
from machine import Row, hardware, take_turns, write_record

EACH, STEPS, BATCH = 20, 20, 20
CLIENTS, COHORT, WIDTH = 1000, 20, 64
ROUNDS = 7
COHORTS = (5, 10, 20, 50, 100, 200)
WIDTHS = (16, 64, 256, 1024, 4096)
FEDERATIONS = (100, 1_000, 10_000, 100_000)


class Training:
    """A run that is taken round by round."""

    def __init__(
        self, engine: EngineName, device: str, clients: int, cohort: int, width: int
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        rows = clients * EACH
        fields = {
            "x": torch.randn(rows, 64, generator=draw),
            "y": torch.randint(10, (rows,), generator=draw),
        }
        task = fx.tasks.classification(
            "scaling",
            partial(fx.models.mlp, 64, width, 10),
            Federation(fields, np.arange(clients + 1) * EACH),
            local=fx.LocalTraining(lr=0.05, steps=STEPS, batch_size=BATCH),
        )
        options: Row = {"engine": engine, "device": device, "evaluate_every": 10**9}
        self.parameters = task.objective.initial(0)[0].numel()
        self.run = fx.simulate(task, fx.fedexp(), 10**9, cohort, **options)
        self.device = device

    def round(self) -> None:
        next(self.run)
        if self.device == "cuda":
            torch.cuda.synchronize()


def compare(what: str, sizes: Sequence[int], engine: EngineName, device: str) -> list[Row]:
    """One row a size, of which all but the one in question are the usual ones."""
    usual = {"clients": CLIENTS, "cohort": COHORT, "width": WIDTH}
    runs = {size: Training(engine, device, **{**usual, what: size}) for size in sizes}
    taken = take_turns({str(size): run.round for size, run in runs.items()}, ROUNDS)
    return [
        {
            what: size,
            "engine": engine,
            "parameters": run.parameters,
            "ms": round(taken[str(size)], 2),
        }
        for size, run in runs.items()
    ]


def table(what: str, rows: list[Row]) -> str:
    """Sizes against engines, with the milliseconds and how they grow from the first size."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    first = {engine: next(r["ms"] for r in rows if r["engine"] == engine) for engine in engines}
    cells = []
    for size in dict.fromkeys(row[what] for row in rows):
        mine = {row["engine"]: row for row in rows if row[what] == size}
        ms = [f"{mine[e]['ms']:.1f} ({mine[e]['ms'] / first[e]:.1f} x)" for e in engines]
        cells.append([f"{size:,}", f"{next(iter(mine.values()))['parameters']:,}", *ms])
    return text_table([what, "parameters", *(f"{e}, ms" for e in engines)], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="how the cost of a round grows")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--engines", default="loop,auto", help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where, tables = hardware(args.device), {}
    sizes = {"cohort": COHORTS, "width": WIDTHS, "clients": FEDERATIONS}
    for what, chosen in sizes.items():
        rows = [r for e in args.engines.split(",") for r in compare(what, chosen, e, args.device)]
        tables[what] = rows
        print(table(what, rows), end="\n\n", flush=True)
    print(f"{where}, {args.threads} thread(s)")
    write_record(args.out, where, tables, threads=args.threads)


if __name__ == "__main__":
    main()
