"""Does a round among a million clients take as long as one among a hundred?

The federations are generated, written to one file each and memory-mapped: ten examples of 64 bytes
a client. A round is 20 clients x 20 steps of batches of 10 of an MLP 64-64-10, FedExP; evaluation,
which reads all data, is left out.

    python benchmarks/clients.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.data.cache import Stream, write
from fedexp.engine import EngineName
from fedexp.experiments.tables import text_table

EACH, COHORT = 10, 20
WARM_UP, ROUNDS = 5, 40
ENGINES: tuple[EngineName, EngineName] = ("loop", "vectorized")
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


def side_by_side(paths: list[Path], engine: EngineName) -> list[float]:
    """The median milliseconds of a round in each federation, whose rounds take turns."""
    runs = [training(path, engine) for path in paths]
    times = [[next(run).seconds for run in runs] for _ in range(WARM_UP + ROUNDS)]
    return [1e3 * statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds among very many clients")
    parser.add_argument("--most", type=int, default=1_000_000, help="clients of the largest")
    numbers = (100, 10_000, parser.parse_args().most)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{clients}.npz" for clients in numbers]
        for path, clients in zip(paths, numbers, strict=True):
            generate(path, clients)
        sizes = [f"{path.stat().st_size / 1e6:.0f}" for path in paths]
        opened = [f"{1e3 * seconds(partial(Federation.open, path)):.0f}" for path in paths]
        loop, batched = (side_by_side(paths, engine) for engine in ENGINES)
    cells = [
        [f"{n:,}", size, took, *with_ratio(one, loop), *with_ratio(many, batched)]
        for n, size, took, one, many in zip(numbers, sizes, opened, loop, batched, strict=True)
    ]
    head = ["clients", "MB", "to open, ms", "loop, ms", "ratio", "vectorized, ms", "ratio"]
    print(f"torch {torch.__version__}, 1 thread, median of {ROUNDS} rounds that took turns")
    print(text_table(head, cells))


def with_ratio(took: float, column: list[float]) -> tuple[str, str]:
    """Milliseconds, and how they compare with the first of their column."""
    return f"{took:.1f}", f"{took / column[0]:.2f}"


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
