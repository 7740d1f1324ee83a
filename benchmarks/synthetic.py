"""Five algorithms x 200 rounds of the synthetic task: in one process, and on the command line.

Reports the time of each algorithm, how it compares with the bare arithmetic of a loop (the same
matrix products step by step, with nothing around them; all local steps of a client are taken in one
go by `engine/linear.py`, so the ratio, with everything else in it, is below 1), and what the whole
of `fedexp compare synthetic` takes beside a Python that only imports torch.

    python benchmarks/synthetic.py --out benchmarks/records/DATE-cpu-synthetic.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.tables import text_table
from fedexp.runs.options import setup_for
from machine import Row, hardware, take_turns, write_record

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


def commands(turns: int = 5) -> dict[str, float]:
    """Seconds of whole processes, which take turns; the first of each warms up the disk."""
    script = Path(sys.executable).with_name("fedexp")

    def compare() -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = ("--runs", folder, "--out", f"{folder}/picture.png", "--quiet")
            _run([str(script), "compare", "synthetic", *options])

    taken = take_turns(
        {
            "fedexp compare synthetic": compare,
            "import torch": lambda: _run([sys.executable, "-c", "import torch"]),
        },
        turns,
        warm=1,
    )
    return {name: ms / 1e3 for name, ms in taken.items()}


def _run(command: Sequence[str]) -> None:
    """With what Python has compiled before kept, as it is where a package is installed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, capture_output=True, env=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description="the synthetic regression")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    out, where = parser.parse_args().out, hardware()
    torch.set_num_threads(1)
    task, rows = fx.tasks.synthetic(), list[Row]()
    floor = bare_arithmetic(task)
    for name in NAMES:
        seconds, loss = measure(task, name)
        ratio = round(seconds / floor, 2)
        rows.append({"algorithm": name, "seconds": round(seconds, 2), "ratio": ratio, "loss": loss})
    print(f"{where}, 1 thread")
    cells = [[*map(str, list(row.values())[:3]), f"{row['loss']:.2g}"] for row in rows]
    print(text_table(["algorithm", "seconds", "x bare arithmetic", "final loss"], cells))
    total = sum(row["seconds"] for row in rows)
    print(f"all five: {total:.1f} s; bare arithmetic of one: {floor:.2f} s")
    whole = commands()
    for name, seconds in whole.items():
        print(f"{name}: {seconds:.1f} s")
    write_record(out, where, rows, bare_seconds=round(floor, 2), command_seconds=whole)


if __name__ == "__main__":
    main()
