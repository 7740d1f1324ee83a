"""States in a file are not in memory: 200 clients of 200,000 parameters in ten rounds."""

from __future__ import annotations

import subprocess
import sys

import torch

import fedexp as fx
from fedexp.engine.client_store import StateStore, StoredStates, Where
from fedexp.engine.slot_file import Layout, SlotFile
from tests.engine.vectors import ROOT, needs_proc, peak, status, toward

DIM, CLIENTS, COHORT, ROUNDS = 200_000, 200, 20, 10
STATES = CLIENTS * DIM * 4 / 1e6  # MB; two thirds of the clients take part


def growth(where: Where) -> float:
    """By how many MB the peak rises from the third round to the last."""
    early, task = 0.0, toward(DIM, CLIENTS)
    run = fx.simulate(task, fx.scaffold(), ROUNDS, COHORT, engine="loop", client_store=where)
    for record in run:
        early = peak() if record.round == 3 else early
    assert len(record.state.clients) > CLIENTS / 2
    return peak() - early


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
