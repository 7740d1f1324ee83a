"""States in a file are not in memory: 200 clients of 200,000 parameters in ten rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.data import Federation
from fedexp.data.federation import Batch
from fedexp.engine.keep_clients import Where
from fedexp.engine.slot_file import Layout, SlotFile
from fedexp.engine.state_store import StateStore, StoredStates
from fedexp.objective import Buffers
from fedexp.tasks import Task

DIM, CLIENTS, COHORT, ROUNDS = 200_000, 200, 20, 10
STATES = CLIENTS * DIM * 4 / 1e6  # MB; two thirds of the clients take part
ROOT = Path(__file__).parents[2]


class Toward:
    """F_i(w) = ||w - x_i||² / 2 with one number x_i: all cost lies in handling the vectors."""

    mixes_examples = False

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return torch.zeros(DIM), Buffers.none()

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return params - batch["x"].mean(), buffers

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (params[0] - batch["x"]).square()}


def status(name: str) -> float:
    """What the system says about this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1e3


def peak() -> float:
    """The most memory this process has held, files that it has mapped included."""
    return status("VmHWM")


def growth(where: Where) -> float:
    """By how many MB the peak rises from the third round to the last."""
    x = torch.arange(CLIENTS) / CLIENTS
    train = Federation({"x": x, "y": torch.zeros(CLIENTS)}, np.arange(CLIENTS + 1))
    task = Task("toward", Toward(), train, fx.LocalTraining(lr=0.5, steps=1, batch_size=1))
    early = 0.0
    run = fx.simulate(task, fx.scaffold(), ROUNDS, COHORT, engine="loop", keep_clients=where)
    for record in run:
        early = peak() if record.round == 3 else early
    assert len(record.state.clients) > CLIENTS / 2
    return peak() - early


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@needs_proc
def test_memory_does_not_grow_with_the_clients_that_took_part() -> None:
    """In memory it does, and this is what the test would see."""
    program = (
        "from tests.engine.test_state_memory import *; torch.set_num_threads(1);"
        "print(growth('disk'), growth('memory'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    on_disk, in_memory = map(float, done.stdout.split())
    assert on_disk < 3 * COHORT * DIM * 4 / 1e6  # a cohort or two that is still being worked on
    assert in_memory > STATES / 2


@needs_proc
def test_pages_that_were_read_are_given_back() -> None:
    """They stay in the system's cache, and do not count as this process's memory."""
    rows = torch.arange(60.0)[:, None].expand(60, 250_000)
    fresh = {"control": torch.zeros(250_000)}
    states = StoredStates(StateStore(SlotFile(Layout.of(fresh)), torch.device("cpu")))
    states = states.updated({client: {"control": row} for client, row in enumerate(rows)})
    before = status("RssFile")
    for at in range(0, 60, 6):
        states.stacked(range(at, at + 6), fresh)
    assert status("RssFile") - before < 20  # of 60
    states.store.file._slots[:, ::4096].sum()  # the same, and nothing is given back
    assert status("RssFile") - before > 40
