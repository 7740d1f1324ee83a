"""Starts a run repeatedly and kills it at random moments; torch is imported once.

killer.py FOLDER KILLS SEED WHERE    whole run in FOLDER/whole, killed one in FOLDER/killed
killer.py hold FOLDER               lock the run in FOLDER until killed

WHERE is where the killed run stores client state, memory or disk.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import cast

import torch

from fedexp.engine.client_store import Location
from fedexp.experiment import Experiment, Resources
from fedexp.runs import Storage, execute

ROUNDS = 150
OPTIONS = {"task.clients": 12, "task.rows": 4, "task.dim": 400}
EXPERIMENT = Experiment("synthetic", "scaffold-exp", rounds=ROUNDS, cohort=5, options=OPTIONS)


def start(folder: Path, where: Location = "memory") -> int:
    """Start the run in a process of its own; return its id."""
    child = os.fork()
    if child == 0:
        resources = Resources(client_store=where, checkpoint_every=0.002)
        execute(EXPERIMENT, Storage(folder), resources=resources)
        os._exit(0)
    return child


def lines(folder: Path) -> int:
    path = folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_a_random_moment(
    folder: Path, rng: random.Random, round_seconds: float, where: Location
) -> int:
    """Wait for some rows, then for a random part of a round; kill; return the number of rows."""
    wanted = rng.choice([0, 0, 1, 2, 3])
    before, child = lines(folder), start(folder, where)
    deadline = time.monotonic() + 60
    while wanted and lines(folder) < min(before + wanted, ROUNDS - 40):
        assert time.monotonic() < deadline, "the run makes no progress"
    time.sleep(rng.uniform(0, 2 * round_seconds))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run was over before it could be killed"
    return lines(folder)


def main(folder: Path, kills: int, seed: int, where: Location) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    assert os.waitpid(start(folder / "whole"), 0)[1] == 0
    round_seconds = (time.monotonic() - began) / ROUNDS
    rng = random.Random(seed)
    for _ in range(kills):
        print(kill_at_a_random_moment(folder / "killed", rng, round_seconds, where), flush=True)
    assert os.waitpid(start(folder / "killed", where), 0)[1] == 0


def hold(folder: Path) -> None:
    """Lock a run and do nothing."""
    from fedexp.runs.folder import RunFolder
    from tests.runs.helpers import tiny

    with RunFolder.of(folder, tiny()):
        print("holding", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if sys.argv[1] == "hold":
        hold(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cast(Location, sys.argv[4]))
