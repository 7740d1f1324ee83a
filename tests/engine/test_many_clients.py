"""A federation of a million clients: a round touches its cohort, and nothing else."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine.client_store import ClientStates

CLIENTS, COHORT = 1_000_000, 20


class Watched(np.ndarray[Any, np.dtype[Any]]):
    """An array that notes the longest array anything was computed of."""

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
    """Two examples a client, of two classes."""
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
    kept = algorithm.client.init_client_state(start.params)
    seen = dict.fromkeys(range(100_000), kept) if kept else {}  # of many rounds before
    options: dict[str, Any] = {"weighting": "size", "evaluate_every": 9, "engine": engine}
    run = fx.simulate(task, algorithm, 9, COHORT, start=replace(start, clients=seen), **options)
    next(run)  # what is found out once, such as how much data each client has
    Watched.longest = 0
    tracemalloc.start()
    try:
        records = [next(run) for _ in range(5)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [record.clients for record in records] == [COHORT] * 5
    assert most < CLIENTS  # bytes: less than one for each client
    assert Watched.longest <= 10 * COHORT
    task.train.sizes.sum()
    assert Watched.longest == CLIENTS  # it would have been seen


Changes = st.lists(st.dictionaries(st.integers(0, 30), st.integers(), max_size=8), max_size=12)


@given(Changes)
def test_client_states_are_like_a_dictionary(changes: list[dict[int, Any]]) -> None:
    plain: dict[int, Any] = {}
    states, before = ClientStates(), []
    for changed in changes:
        before.append((states, dict(plain)))
        plain |= changed
        states = states.updated(changed)
        assert (dict(states), len(states)) == (plain, len(plain))
        assert all(states.get(key, "none") == plain.get(key, "none") for key in range(31))
    for old, expected in before:
        assert dict(old) == expected


def test_a_round_copies_few_client_states() -> None:
    """The copying that 1,000 rounds of 10 clients do: n log n, where a dictionary's is n²."""
    states, copied = ClientStates(), 0
    for round in range(1000):
        old = {id(layer) for layer in states._layers}
        states = states.updated({10 * round + k: {} for k in range(10)})
        copied += sum(len(layer) for layer in states._layers if id(layer) not in old)
    assert len(states) == 10_000
    assert copied < 10_000 * 14
