"""A round among a million clients against one among a hundred.

The federations are generated, written to one file each and memory-mapped: ten examples of 64 bytes
per client. A round is 20 clients x 20 steps of batches of 10 of an MLP 64-64-10, FedExP, without
evaluation, which reads all data. Rounds of all engines and federations take turns.

    python benchmarks/clients.py --out benchmarks/records/DATE-cpu-clients.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation, Images
from fedexp.data.sources.cache import Stream, write
from fedexp.engine import EngineName
from machine import Rounds, Row, Timing, hardware, take_turns, write_record

EACH, COHORT = 10, 20
WARM_UP, ROUNDS = 5, 30
ENGINES: tuple[EngineName, EngineName] = ("loop", "auto")
BLOCK = 100_000  # clients generated at a time


def generate(path: Path, clients: int) -> None:
    """Write a federation of `clients` without holding it in memory."""
    rng = np.random.default_rng(0)
    rows = clients * EACH

    def blocks(high: int, *shape: int) -> Iterator[NDArray[np.uint8]]:
        for first in range(0, clients, BLOCK):
            some = EACH * (min(clients, first + BLOCK) - first)
            yield rng.integers(0, high, (some, *shape), dtype=np.uint8)

    write(
        path,
        {
            "x": Stream((rows, 1, 8, 8), np.uint8, blocks(256, 1, 8, 8)),
            "y": Stream((rows,), np.int64, blocks(10)),
            "offsets": np.arange(clients + 1, dtype=np.int64) * EACH,
        },
    )


def training(path: Path, engine: EngineName) -> Iterator[fx.Record]:
    """Return rounds without end; the data of clients are read when they are drawn."""
    task = fx.tasks.classification(
        "mapped",
        partial(fx.models.mlp, 64, 64, 10),
        Federation.open(path),
        transform=Images((0.5,), (0.25,), augment=None),
        local=fx.LocalTraining(lr=0.1, steps=20, batch_size=EACH),
    )
    return fx.simulate(task, fx.fedexp(), 10**9, COHORT, evaluate_every=10**9, engine=engine)


def side_by_side(paths: Sequence[Path], rounds: int) -> list[dict[str, Timing]]:
    """Return the timings by the engine that ran, for each federation; all take turns."""
    runs = {
        f"{engine} {path}": Rounds(training(path, engine)) for path in paths for engine in ENGINES
    }
    taken = take_turns(runs, rounds, WARM_UP)
    names = [[f"{engine} {path}" for engine in ENGINES] for path in paths]
    return [{runs[name].engine: taken[name] for name in each} for each in names]


def measure(numbers: Sequence[int], folder: Path, rounds: int) -> list[Row]:
    """Return one row per federation and engine."""
    paths = [folder / f"{clients}.npz" for clients in numbers]
    for path, clients in zip(paths, numbers, strict=True):
        generate(path, clients)
    opened = [1e3 * seconds(partial(Federation.open, path)) for path in paths]
    timings = side_by_side(paths, rounds)
    rows = []
    for clients, path, took, taken in zip(numbers, paths, opened, timings, strict=True):
        for engine, timing in taken.items():
            size = {"MB": round(path.stat().st_size / 1e6), "open_ms": round(took, 1)}
            growth = round(timing.median / timings[0][engine].median, 2)
            rows.append(
                {"clients": clients, **size, "engine": engine, **timing.row(), "ratio": growth}
            )
    return rows


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds among very many clients")
    parser.add_argument("--most", type=int, default=1_000_000, help="clients of the largest")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds counted ({ROUNDS})")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args, where = parser.parse_args(), hardware()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure((100, 10_000, args.most), Path(folder), args.rounds)
    head = ["clients", "MB", "open, ms", "engine", "ms per round", "min", "max", "rounds", "x 100"]
    print(f"{where}, 1 thread, median of {args.rounds} rounds that took turns")
    cells = [[v if isinstance(v, str) else f"{v:,}" for v in row.values()] for row in rows]
    print(text_table(head, cells))
    write_record(args.out, where, rows, threads=1)


if __name__ == "__main__":
    main()
