"""Five algorithms x 200 rounds of the synthetic task in one process.

Reports the time of each algorithm, and how it compares with the bare arithmetic of a loop: the
same matrix products step by step, with nothing around them. All local steps of a client are taken
in one go (`engine/linear.py`), so the ratio, with everything else in it, is below 1.

    python benchmarks/synthetic.py
"""

from __future__ import annotations

import time

import torch

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.experiments.setup import setup_for
from fedexp.experiments.tables import text_table
from machine import hardware

ROUNDS = 200
NAMES = ("fedexp", "scaffold", "fedadagrad", "fedprox", "fedavg")


def bare_arithmetic(task: fx.tasks.Task) -> float:
    """The floor of a loop: rounds of local gradient steps and a mean, in plain torch."""
    clients = [task.train.client(i) for i in range(task.train.clients)]
    w = task.objective.initial(0)[0]
    began = time.perf_counter()
    for _ in range(ROUNDS // 10):
        local = []
        for batch in clients:
            v = w
            for _ in range(task.local.steps):
                residual = torch.mv(batch["x"], v) - batch["y"]
                v = v - task.local.lr * torch.mv(batch["x"].t(), residual)
            local.append(v)
        w = torch.stack(local).mean(0)
    return 10 * (time.perf_counter() - began)


def measure(task: fx.tasks.Task, name: str) -> tuple[float, float]:
    setup = setup_for(task, ALGORITHMS[name](), "paper")
    began = time.perf_counter()
    *_, last = fx.simulate(task, setup.algorithm, ROUNDS, local=setup.local)
    assert last.train_loss is not None
    return time.perf_counter() - began, last.train_loss


def main() -> None:
    torch.set_num_threads(1)
    task = fx.tasks.synthetic()
    floor = bare_arithmetic(task)
    cells, total = [], 0.0
    for name in NAMES:
        seconds, loss = measure(task, name)
        total += seconds
        cells.append([name, f"{seconds:.2f}", f"{seconds / floor:.2f}", f"{loss:.2g}"])
    print(f"{hardware()}, 1 thread")
    print(text_table(["algorithm", "seconds", "x bare arithmetic", "final loss"], cells))
    print(f"all five: {total:.1f} s; bare arithmetic of one: {floor:.2f} s")


if __name__ == "__main__":
    main()
