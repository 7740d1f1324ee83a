"""Five algorithms x 200 rounds of the synthetic task: in one process, and on the command line.

Reports the time of each algorithm and its ratio to the bare arithmetic of a loop (the same matrix
products step by step, and nothing else); the quadratic engine takes all local steps of a client at
once, so the ratio is below 1. Then the time of the command `fedexp compare synthetic`, beside a
Python that only imports torch. All take turns; medians with their range.

    python benchmarks/synthetic.py --out benchmarks/records/DATE-cpu-synthetic.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import fedexp as fx
from fedexp.analysis.tables import text_table
from machine import Row, hardware, ratio, take_turns, write_record

ROUNDS, TURNS = 200, 5
NAMES = ("fedexp", "scaffold", "fedadagrad", "fedprox", "fedavg")


def bare_arithmetic(task: fx.tasks.Task, rounds: int) -> None:
    """Run the arithmetic of a loop: rounds of local gradient steps and a mean, in plain torch."""
    clients = [task.train.client(i) for i in range(task.train.clients)]
    w = task.objective.initial(0)[0]
    for _ in range(rounds):
        local = []
        for batch in clients:
            v = w
            for _ in range(task.local.steps_for(1)):
                residual = torch.mv(batch["x"], v) - batch["y"]
                v = v - task.local.lr * torch.mv(batch["x"].t(), residual)
            local.append(v)
        w = torch.stack(local).mean(0)


class Training:
    """All rounds of an algorithm; has the engine that ran, and the final loss."""

    def __init__(self, task: fx.tasks.Task, name: str, rounds: int) -> None:
        self.task, self.rounds = task, rounds
        self.setup = fx.Experiment(task, name).setup
        self.engine, self.loss = "", float("nan")

    def __call__(self) -> None:
        setup = self.setup
        *_, last = fx.simulate(self.task, setup.algorithm, self.rounds, local=setup.local)
        assert last.train_loss is not None
        self.engine, self.loss = last.engine, last.train_loss


def algorithms(turns: int, rounds: int) -> list[Row]:
    """Return one row per algorithm: seconds, engine, and the ratio to bare arithmetic."""
    task = fx.tasks.synthetic()
    runs = {name: Training(task, name, rounds) for name in NAMES}
    taken = take_turns({"bare": partial(bare_arithmetic, task, rounds), **runs}, turns, warm=1)
    rows = []
    for name, run in runs.items():
        times = ratio(taken[name], taken["bare"])
        row = {"algorithm": name, "engine": run.engine, "rounds": rounds, **taken[name].row()}
        low, high = round(min(times.turns), 2), round(max(times.turns), 2)
        row |= {"ratio": round(times.median, 2), "ratio_min": low, "ratio_max": high}
        rows.append({**row, "loss": run.loss})
    return rows


def commands(turns: int) -> dict[str, Row]:
    """Return the timing of whole processes, which take turns; the first of each is not counted."""
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
    return {name: timing.row() for name, timing in taken.items()}


def _run(command: Sequence[str]) -> None:
    """Run a command with cached bytecode, as for an installed package."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, capture_output=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description="the synthetic regression")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns of each ({TURNS})")
    parser.add_argument("--no-commands", action="store_true", help="leave out whole processes")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args, where = parser.parse_args(), hardware()
    torch.set_num_threads(1)
    rows = algorithms(args.turns, args.rounds)
    print(f"{where}, 1 thread; {args.rounds} rounds, median of {args.turns} turns (min-max)")
    cells = [
        [
            row["algorithm"],
            row["engine"],
            f"{row['ms'] / 1e3:.2f} ({row['ms_min'] / 1e3:.2f}-{row['ms_max'] / 1e3:.2f})",
            f"{row['ratio']} ({row['ratio_min']}-{row['ratio_max']})",
            f"{row['loss']:.2g}",
        ]
        for row in rows
    ]
    head = ["algorithm", "engine", "seconds", "x bare arithmetic", "final loss"]
    print(text_table(head, cells))
    whole = {} if args.no_commands else commands(args.turns)
    for name, timing in whole.items():
        low, high = timing["ms_min"] / 1e3, timing["ms_max"] / 1e3
        print(f"{name}: {timing['ms'] / 1e3:.1f} s ({low:.1f}-{high:.1f})")
    write_record(args.out, where, rows, commands=whole)


if __name__ == "__main__":
    main()
