"""Does a round among a million clients take as long as one among a hundred?

The federations are generated, written to one file each and memory-mapped: ten examples of 64 bytes
a client. A round is 20 clients x 20 steps of batches of 10 of an MLP 64-64-10, FedExP; evaluation,
which reads all data, is left out.

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
from machine import Row, hardware, take_turns, write_record

EACH, COHORT = 10, 20
WARM_UP, ROUNDS = 5, 30
ENGINES: tuple[EngineName, EngineName] = ("loop", "auto")
BLOCK = 100_000  # clients that are generated at a time


def generate(path: Path, clients: int) -> None:
    """Write a federation of `clients` without holding it."""
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
    """Rounds without end, of clients that are read from the file when they are drawn."""
    task = fx.tasks.classification(
        "mapped",
        partial(fx.models.mlp, 64, 64, 10),
        Federation.open(path),
        transform=Images((0.5,), (0.25,), augment=None),
        local=fx.LocalTraining(lr=0.1, steps=20, batch_size=EACH),
    )
    return fx.simulate(task, fx.fedexp(), 10**9, COHORT, evaluate_every=10**9, engine=engine)


def side_by_side(paths: Sequence[Path]) -> list[dict[str, float]]:
    """The median milliseconds of a round of each engine in each federation, taking turns."""
    turns = {
        f"{engine} {path}": partial(next, training(path, engine))
        for path in paths
        for engine in ENGINES
    }
    taken = take_turns(turns, ROUNDS, WARM_UP)
    return [{engine: taken[f"{engine} {path}"] for engine in ENGINES} for path in paths]


def measure(numbers: Sequence[int], folder: Path) -> list[Row]:
    """A row for each federation."""
    paths = [folder / f"{clients}.npz" for clients in numbers]
    for path, clients in zip(paths, numbers, strict=True):
        generate(path, clients)
    opened = [1e3 * seconds(partial(Federation.open, path)) for path in paths]
    rows, first = [], dict[str, float]()
    for clients, path, took, taken in zip(numbers, paths, opened, side_by_side(paths), strict=True):
        first = first or taken
        row: Row = {"clients": clients, "MB": round(path.stat().st_size / 1e6)}
        row["open_ms"] = round(took, 1)
        for engine, ms in taken.items():
            row |= {f"{engine}_ms": round(ms, 2), f"{engine}_ratio": round(ms / first[engine], 2)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds among very many clients")
    parser.add_argument("--most", type=int, default=1_000_000, help="clients of the largest")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args, where = parser.parse_args(), hardware()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure((100, 10_000, args.most), Path(folder))
    head = ["clients", "MB", "to open, ms", "loop, ms", "ratio", "auto, ms", "ratio"]
    print(f"{where}, 1 thread, median of {ROUNDS} rounds that took turns")
    print(text_table(head, [[f"{value:,}" for value in row.values()] for row in rows]))
    write_record(args.out, where, rows, threads=1)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
