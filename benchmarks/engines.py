"""What "auto" takes against the plain loop on a CPU.

Whole rounds with planning, sums and server step, without evaluation; the two take turns, median.
Small models get one thread, as on the command line, large ones all cores. Large models train on
generated images, most in rounds so short that the whole takes four minutes.

    python benchmarks/engines.py --out benchmarks/records/DATE-cpu-engines.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation
from fedexp.engine import EngineName
from fedexp.runs.spec import SMALL_MODEL
from fedexp.tasks import Task
from machine import Row, cores, hardware, take_turns, write_record
from peers_work import WORKS

ENGINES: tuple[EngineName, EngineName] = ("loop", "auto")


@dataclass(frozen=True)
class Case:
    """A task whose engines are compared, with the clients of a round and the rounds that count."""

    task: Callable[[], Task]
    cohort: int = 20
    rounds: int = 15
    both: bool = True  # SCAFFOLD as well as FedExP


class OwnModel(nn.Module):
    """A perceptron as people write it: not a plain sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(x).relu())
        return out


def own_model() -> Task:
    digits = fx.tasks.digits("mlp")
    return fx.tasks.classification("own", OwnModel, digits.train, local=digits.local)


def images(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    classes: int,
    steps: int = 2,
    batch: int = 20,
    each: int = 60,
) -> Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20 * each, *shape, generator=draw)
    y = torch.randint(classes, (len(x),), generator=draw)
    train = Federation({"x": x, "y": y}, np.arange(21) * each)
    local = fx.LocalTraining(
        lr=0.01, steps=steps, batch_size=batch, weight_decay=1e-4, clip_norm=10.0
    )
    return fx.tasks.classification("images", build, train, local=local)


CASES = {
    "digits, logistic": Case(fx.tasks.digits),
    "digits, MLP": Case(partial(fx.tasks.digits, "mlp")),
    "digits, MLP as a class": Case(own_model),
    "synthetic regression": Case(fx.tasks.synthetic),
    "EMNIST CNN": Case(partial(images, fx.models.emnist_cnn, (1, 28, 28), 62), 8, 3, False),
    "EMNIST CNN, the paper's": Case(  # 20 steps of batches of 50
        partial(images, fx.models.emnist_cnn, (1, 28, 28), 62, 20, 50, 100), 8, 5, False
    ),
    "CIFAR CNN": Case(partial(images, fx.models.cifar_cnn, (3, 32, 32), 10), 8, 3, False),
    "pfl's CNN, batch 10": Case(
        partial(images, WORKS["W2"].build, (3, 32, 32), 10, 3, 10), 8, 3, False
    ),
    "ResNet-18": Case(
        partial(images, partial(fx.models.resnet18, 10), (3, 32, 32), 10, 1, 8), 4, 2, False
    ),
}


def compare(name: str, case: Case) -> list[Row]:
    task = case.task()
    size, rows = task.objective.initial(0)[0].numel(), []
    threads = 1 if size < SMALL_MODEL else cores()
    torch.set_num_threads(threads)
    for algorithm in (fx.fedexp(), fx.scaffold())[: 1 + case.both]:
        runs = {
            engine: fx.simulate(
                task, algorithm, 10**9, case.cohort, engine=engine, evaluate_every=10**9
            )
            for engine in ENGINES
        }
        turns = {str(engine): partial(next, run) for engine, run in runs.items()}
        taken = take_turns(turns, case.rounds, warm=2 if case.both else 1)
        row = {"task": name, "algorithm": algorithm.name, "parameters": size, "threads": threads}
        milliseconds = {f"{engine}_ms": round(ms, 2) for engine, ms in taken.items()}
        rows.append({**row, **milliseconds, "ratio": round(taken["loop"] / taken["auto"], 2)})
        print(f"  {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row]) -> str:
    head = ["task", "algorithm", "parameters", "threads", "loop, ms", "auto, ms", "ratio"]
    cells = [[f"{v:,}" if type(v) is int else f"{v}" for v in row.values()] for row in rows]
    return text_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="what auto takes against the loop")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    out, where = parser.parse_args().out, hardware()
    rows = [row for name, case in CASES.items() for row in compare(name, case)]
    print(where)
    print(table(rows))
    write_record(out, where, rows)


if __name__ == "__main__":
    main()
