"""The server's memory does not grow with the cohort: 1,000 clients of a million parameters."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.engine import EngineName
from tests.engine.vectors import ROOT, needs_proc, peak, toward

DIM, CLIENTS = 1_000_000, 1_000
BOUND = 1_500  # MB; the updates of all clients are 4,000


def round_of(engine: EngineName, clients: int) -> None:
    """One round; prints by how much the peak of this process's memory rose."""
    torch.set_num_threads(1)
    task = toward(DIM, clients)
    before = peak()
    (record,) = fx.simulate(task, fx.fedexp(), 1, engine=engine)
    assert record.clients == clients
    assert record.server_lr is not None
    moved = record.server_lr * task.local.lr * float(task.train.fields["x"].mean())
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


@needs_proc
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_memory_does_not_grow_with_the_cohort(engine: str) -> None:
    assert measured(f"round_of({engine!r}, {CLIENTS})") < BOUND


@needs_proc
def test_a_server_that_keeps_updates_is_found_out() -> None:
    """What the test above would see: 450 clients of it are enough."""
    assert measured("hoarding_round('loop', 450)") > BOUND
