"""What a round costs does not grow with the cohort, the clients that took part, or all clients."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine.client_store import StateStore, StoredStates
from fedexp.engine.slot_file import Layout, SlotFile
from tests.engine.helpers import in_child, needs_proc, status

BOUND = 300  # MB; the updates of 200 clients of a million parameters are 800


@needs_proc
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_memory_does_not_grow_with_the_cohort(engine: str) -> None:
    assert float(in_child(f"one_round({engine!r}, 200)")) < BOUND


@needs_proc
def test_a_server_that_stores_updates_would_be_seen() -> None:
    assert float(in_child("hoarding_round('loop', 90)")) > BOUND


@needs_proc
def test_memory_does_not_grow_with_the_clients_that_took_part() -> None:
    """With states on disk; in memory it does, and would be seen."""
    dim, clients, cohort = 200_000, 200, 20
    (on_disk, _), (in_memory, state) = (
        map(float, in_child(f"growth({where!r}, {dim}, {clients}, {cohort})").split())
        for where in ("disk", "memory")
    )
    bound = 3 * cohort * dim * 4 / 1e6  # a cohort or two that is still being trained
    assert on_disk < bound < state
    assert in_memory > 0.9 * state  # the allocator may have some space left from before


@needs_proc
def test_pages_that_were_read_are_released(tmp_path: Path) -> None:
    """They stay in the system's cache, and do not count as this process's memory."""
    rows = torch.arange(60.0)[:, None].expand(60, 250_000)
    initial, path = {"control": torch.zeros(250_000)}, tmp_path / "slots"
    states = StoredStates(StateStore(SlotFile(Layout.of(initial), path), torch.device("cpu")))
    states = states.updated({client: {"control": row} for client, row in enumerate(rows)})
    before = status("RssFile")
    for at in range(0, 60, 6):
        states.stacked(range(at, at + 6), initial)
    assert status("RssFile") - before < 20  # of 60
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped[3::4096].any()  # the same by a plain map, which releases nothing
    assert status("RssFile") - before > 40


CLIENTS, COHORT = 1_000_000, 20


class Watched(np.ndarray[Any, np.dtype[Any]]):
    """An array that records the length of the longest array in any computation."""

    longest = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Watched.note(inputs)
        plain = [np.asarray(each) for each in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        return result.view(Watched) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Watched.note(args)
        return super().__array_function__(function, types, args, kwargs)

    @classmethod
    def note(cls, inputs: Any) -> None:
        cls.longest = max(cls.longest, *(getattr(each, "size", 1) for each in inputs))


def million() -> fx.tasks.Task:
    """Return a million clients with two examples each, of two classes."""
    y = torch.arange(2 * CLIENTS) % 2
    fields = {"x": torch.stack([y, 1 - y], dim=1).float(), "y": y}
    offsets = np.arange(CLIENTS + 1) * 2
    local = fx.LocalTraining(lr=0.1, steps=2, batch_size=2)
    train = Federation(fields, offsets.view(Watched))
    return fx.tasks.classification("million", lambda: nn.Linear(2, 2), train, local=local)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("algorithm", [fx.fedexp(), fx.scaffold()], ids=lambda a: a.name)
def test_a_round_touches_its_cohort_only(algorithm: fx.Algorithm, engine: str) -> None:
    task = million()
    start = fx.SimulationState.initial(task, algorithm, 0)
    initial = algorithm.client.init_client_state(start.params)
    seen = dict.fromkeys(range(100_000), initial) if initial else {}  # of many earlier rounds
    options: dict[str, Any] = {"weighting": "size", "evaluate_every": 9, "engine": engine}
    run = fx.simulate(task, algorithm, 9, COHORT, start=replace(start, clients=seen), **options)
    next(run)  # what is computed once, such as the sizes of all clients
    Watched.longest = 0
    tracemalloc.start()
    try:
        records = [next(run) for _ in range(5)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [record.clients for record in records] == [COHORT] * 5
    assert most < CLIENTS  # bytes: less than one per client
    assert Watched.longest <= 10 * COHORT
    task.train.sizes.sum()
    assert Watched.longest == CLIENTS  # it would have been seen
