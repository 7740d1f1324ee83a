"""Batched engine against the loop on a CPU: 3.2 to 5.2 times on digits, 0.7 to 0.9 on synthetic.

One thread of a 2-core x86-64 at 2.8 GHz, torch 2.13.0, median of 7 rounds, two runs of the
script, 2026-11-15.

Both run the same rounds of the same tasks in one process, one thread, one after the other; the
first round, which warms up, is not counted, and neither is evaluation.
"""

from __future__ import annotations

import platform
import statistics

import torch

import fedexp as fx
from fedexp.engine import EngineName
from fedexp.experiments.tables import text_table

ROUNDS = 8


def milliseconds(task: fx.tasks.Task, algorithm: fx.Algorithm, engine: EngineName) -> float:
    """The median time of a round."""
    cohort = min(20, task.train.clients)
    run = fx.simulate(task, algorithm, ROUNDS, cohort, engine=engine, evaluate_every=ROUNDS)
    return 1e3 * statistics.median([record.seconds for record in run][1:])


def main() -> None:
    torch.set_num_threads(1)
    tasks = {
        "digits, logistic": fx.tasks.digits("logistic"),
        "digits, MLP": fx.tasks.digits("mlp"),
        "synthetic regression": fx.tasks.synthetic(),
    }
    cells = []
    for name, task in tasks.items():
        for algorithm in (fx.fedexp(), fx.scaffold()):
            loop, batched = (milliseconds(task, algorithm, e) for e in ("loop", "vectorized"))
            ratio = f"{loop / batched:.1f}"
            cells.append([name, algorithm.name, f"{loop:.1f}", f"{batched:.1f}", ratio])
    print(f"{platform.machine()}, torch {torch.__version__}, 1 thread, 20 clients x 20 steps")
    print(text_table(["task", "algorithm", "loop ms", "vectorized ms", "loop / vectorized"], cells))


if __name__ == "__main__":
    main()
