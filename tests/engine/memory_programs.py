"""What the tests of memory run in a process of its own, whose peak is theirs alone."""

from __future__ import annotations

from typing import Any

import torch

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.engine import EngineName
from fedexp.engine.client_store import Location
from tests.engine.helpers import peak, toward

torch.set_num_threads(1)


def one_round(engine: EngineName, clients: int, dim: int = 1_000_000) -> None:
    """Run one round; print by how many MB the peak rose."""
    task = toward(dim, clients)
    before = peak()
    (record,) = fx.simulate(task, fx.fedexp(), 1, engine=engine)
    assert record.clients == clients
    assert record.server_lr is not None
    expected = record.server_lr * task.local.lr * float(task.train.fields["x"].mean())
    torch.testing.assert_close(record.state.params[-3:], torch.full((3,), expected))
    print(peak() - before)


def hoarding_round(engine: EngineName, clients: int) -> None:
    """Run the same round on a server that stores what it has summed."""
    hoard, of = [], Aggregate.of

    def store(deltas: torch.Tensor, *more: Any) -> Aggregate:
        hoard.append(deltas)
        return of(deltas, *more)

    Aggregate.of = store  # type: ignore[assignment,method-assign]
    one_round(engine, clients)


def growth(where: Location, dim: int, clients: int, cohort: int) -> None:
    """Run ten rounds of SCAFFOLD; print the growth of the peak after the third, and of the state.

    Both in MB; the latter is the state of the clients that took part after it for the first time.
    """
    early, known, task = 0.0, 0, toward(dim, clients)
    run = fx.simulate(task, fx.scaffold(), 10, cohort, engine="loop", client_store=where)
    for record in run:
        if record.round == 3:
            early, known = peak(), len(record.state.clients)
    assert len(record.state.clients) > clients / 2
    print(peak() - early, (len(record.state.clients) - known) * dim * 4 / 1e6)
