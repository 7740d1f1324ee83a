"""The time of a round against the size of the cohort, of the model and of the federation.

FedExP on an MLP with one hidden layer, 20 steps of batches of 20, generated data, no evaluation.
The rounds of one table take turns, so its ratios hold on a machine that is not idle; medians with
their range. Tables name the engine that ran at each size.

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
from machine import Rounds, Row, hardware, take_turns, write_record

EACH, STEPS, BATCH = 20, 20, 20
CLIENTS, COHORT, WIDTH = 1000, 20, 64
ROUNDS = 7
COHORTS = (5, 10, 20, 50, 100, 200)
WIDTHS = (16, 64, 256, 1024, 4096)
FEDERATIONS = (100, 1_000, 10_000, 100_000)


class Training(Rounds):
    """FedExP on generated data, run round by round."""

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
        super().__init__(fx.simulate(task, fx.fedexp(), 10**9, cohort, **options), device)


def compare(
    what: str, sizes: Sequence[int], engine: EngineName, device: str, rounds: int
) -> list[Row]:
    """Return one row per value of one size; the other sizes have their default."""
    usual = {"clients": CLIENTS, "cohort": COHORT, "width": WIDTH}
    runs = {size: Training(engine, device, **{**usual, what: size}) for size in sizes}
    taken = take_turns({str(size): run for size, run in runs.items()}, rounds)
    return [
        {
            what: size,
            "requested": engine,
            "engine": run.engine,
            "parameters": run.parameters,
            **taken[str(size)].row(),
        }
        for size, run in runs.items()
    ]


def table(what: str, rows: list[Row]) -> str:
    """Return one line per size and engine: milliseconds, and their growth from the first size."""
    first: dict[str, float] = {}
    cells = []
    for row in rows:
        growth = row["ms"] / first.setdefault(row["requested"], row["ms"])
        ms = f"{row['ms']:.1f} ({row['ms_min']:.1f}-{row['ms_max']:.1f})"
        cells.append(
            [f"{row[what]:,}", f"{row['parameters']:,}", row["engine"], ms, f"{growth:.1f}"]
        )
    return text_table([what, "parameters", "engine", "ms per round", "x the first"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="how the cost of a round grows")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--engines", default="loop,auto", help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds counted ({ROUNDS})")
    parser.add_argument("--tiny", action="store_true", help="two sizes each, for a dry run")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where, tables = hardware(args.device), {}
    sizes = {"cohort": COHORTS, "width": WIDTHS, "clients": FEDERATIONS}
    for what, chosen in sizes.items():
        rows = list[Row]()
        for engine in args.engines.split(","):
            few = chosen[:2] if args.tiny else chosen
            rows += compare(what, few, engine, args.device, args.rounds)
        tables[what] = rows
        print(table(what, rows), end="\n\n", flush=True)
    print(f"{where}, {args.threads} thread(s); median of {args.rounds} rounds (min-max)")
    write_record(args.out, where, tables, threads=args.threads)


if __name__ == "__main__":
    main()
