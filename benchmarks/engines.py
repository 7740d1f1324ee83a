"""Faster engines against the plain loop on a CPU.

Whole rounds of 20 clients with planning, sums and server step, without evaluation; the two take
turns, median. Small models get one thread, as on the command line, large ones all cores. EMNIST and
CIFAR are generated images: 3 steps of batches of 20 are enough to tell.

    python benchmarks/engines.py
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.experiments.spec import SMALL_MODEL
from fedexp.experiments.tables import text_table
from fedexp.tasks import Task
from machine import hardware

COHORT = 20
SEVERAL, FEW = 9, 5  # rounds of small and of large models; the first two warm up


def images(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (COHORT * 60, *shape), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, len(x)))
    train = Federation({"x": x, "y": y}, np.arange(COHORT + 1) * 60)
    even = (0.5,) * shape[0]
    local = fx.LocalTraining(lr=0.01, steps=3, batch_size=20, weight_decay=1e-4, clip_norm=10.0)
    plain = Images(even, even, augment=None)
    return fx.tasks.classification(name, build, train, transform=plain, local=local)


def tasks() -> dict[str, Task]:
    return {
        "digits, logistic": fx.tasks.digits("logistic"),
        "digits, MLP": fx.tasks.digits("mlp"),
        "synthetic regression": fx.tasks.synthetic(),
        "EMNIST CNN": images("emnist", fx.models.emnist_cnn, (1, 28, 28), 62),
        "CIFAR CNN": images("cifar", fx.models.cifar_cnn, (3, 32, 32), 10),
    }


def side_by_side(task: Task, algorithm: fx.Algorithm, small: bool) -> tuple[float, float]:
    """The median milliseconds of a round of the loop and of what "auto" takes."""
    rounds = SEVERAL if small else FEW
    runs = [
        fx.simulate(task, algorithm, rounds + 1, COHORT, engine=engine, evaluate_every=10**9)
        for engine in ("loop", "auto")
    ]
    times = [[next(run).seconds for run in runs] for _ in range(rounds)]
    loop, fast = (1e3 * statistics.median(column) for column in zip(*times[2:], strict=True))
    return loop, fast


def main() -> None:
    cells, cores = [], len(os.sched_getaffinity(0))
    for name, task in tasks().items():
        size = task.objective.initial(0)[0].numel()
        torch.set_num_threads(1 if size < SMALL_MODEL else cores)
        for algorithm in (fx.fedexp(), fx.scaffold()):
            loop, fast = side_by_side(task, algorithm, size < SMALL_MODEL)
            numbers = [f"{size:,}", f"{loop:.1f}", f"{fast:.1f}", f"{loop / fast:.1f}"]
            cells.append([name, algorithm.name, *numbers])
    print(hardware())
    print(text_table(["task", "algorithm", "parameters", "loop, ms", "auto, ms", "ratio"], cells))


if __name__ == "__main__":
    main()
