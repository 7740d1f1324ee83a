"""How a round's cost grows with the cohort, with the model and with the federation.

FedExP on an MLP with one hidden layer, 20 steps of batches of 20, generated data, no evaluation.
The rounds of one table take turns, so its ratios hold on a machine that is not quite idle; medians.

    python benchmarks/scaling.py                    # the CPU, one thread
    python benchmarks/scaling.py --device cuda --out benchmarks/records/DATE-CARD-scaling.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine import EngineName
from fedexp.experiments.tables import text_table
from machine import hardware, today

EACH, STEPS, BATCH = 20, 20, 20
CLIENTS, COHORT, WIDTH = 1000, 20, 64
WARM_UP, ROUNDS = 2, 9
COHORTS = (5, 10, 20, 50, 100, 200)
WIDTHS = (16, 64, 256, 1024, 4096)
FEDERATIONS = (100, 1_000, 10_000, 100_000)
Row = dict[str, Any]


class Training:
    """A run whose rounds are timed one by one."""

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
        self.device, self.times = device, list[float]()

    def round(self) -> None:
        began = time.perf_counter()
        next(self.run)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - began))

    @property
    def median(self) -> float:
        return statistics.median(self.times[WARM_UP:])


def compare(what: str, sizes: Sequence[int], engine: EngineName, device: str) -> list[Row]:
    """One row a size, of which all but the one in question are the usual ones."""
    usual = {"clients": CLIENTS, "cohort": COHORT, "width": WIDTH}
    runs = [Training(engine, device, **{**usual, what: size}) for size in sizes]
    for _ in range(WARM_UP + ROUNDS):
        for run in runs:
            run.round()
    return [
        {what: size, "engine": engine, "parameters": run.parameters, "ms": round(run.median, 2)}
        for size, run in zip(sizes, runs, strict=True)
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
    parser.add_argument("--engines", default="loop,vectorized", help="names, separated by commas")
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
    if args.out:
        record = {"date": today(), "hardware": where, "threads": args.threads, "rows": tables}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
