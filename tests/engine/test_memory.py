"""The server's memory does not grow with the cohort: 1,000 clients of a million parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.data import Federation
from fedexp.data.federation import Batch
from fedexp.engine import EngineName
from fedexp.objective import Buffers
from fedexp.tasks import Task

DIM, CLIENTS = 1_000_000, 1_000
BOUND = 1_500  # MB; the updates of all clients are 4,000
ROOT = Path(__file__).parents[2]


class Toward:
    """F_i(w) = ||w - x_i||² / 2 with one number x_i: all cost lies in handling the vectors."""

    mixes_examples = False

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return torch.zeros(DIM), Buffers.none()

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return params - batch["x"].mean(), buffers

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        return params - batch["x"].mean(dim=1, keepdim=True), buffers

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (params[0] - batch["x"]).square()}


def peak() -> float:
    """The most memory this process has held so far, in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) / 1e3


def round_of(engine: EngineName, clients: int) -> None:
    """One round; prints by how much the peak of this process's memory rose."""
    torch.set_num_threads(1)
    fields = {"x": torch.arange(clients) / clients, "y": torch.zeros(clients)}
    local = fx.LocalTraining(lr=0.5, steps=1, batch_size=1)
    task = Task("toward", Toward(), Federation(fields, np.arange(clients + 1)), local)
    before = peak()
    (record,) = fx.simulate(task, fx.fedexp(), 1, engine=engine)
    assert record.clients == clients
    assert record.server_lr is not None
    moved = record.server_lr * local.lr * float(fields["x"].mean())
    torch.testing.assert_close(record.state.params[-3:], torch.full((3,), moved))
    print(peak() - before)


def hoarding_round(engine: EngineName, clients: int) -> None:
    """The same on a server that keeps what it has summed."""
    hoard, of = [], Aggregate.of

    def keep(deltas, *more):  # type: ignore[no-untyped-def]
        hoard.append(deltas)
        return of(deltas, *more)

    Aggregate.of = keep  # type: ignore[method-assign]
    round_of(engine, clients)


def measured(call: str) -> float:
    program = f"from tests.engine.test_memory import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_memory_does_not_grow_with_the_cohort(engine: str) -> None:
    assert measured(f"round_of({engine!r}, {CLIENTS})") < BOUND


@needs_proc
def test_a_server_that_keeps_updates_is_found_out() -> None:
    """What the test above would see: 450 clients of it are enough."""
    assert measured("hoarding_round('loop', 450)") > BOUND
