"""Client states, in memory and in a file: like a dictionary, the same numbers, few slots."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedexp as fx
from fedexp.engine import client_store
from fedexp.engine.client_store import ClientStates, ClientStore, StateStore, StoredStates
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.slot_file import Layout, SlotFile
from fedexp.tasks import Task
from tests.helpers.problems import BatchNormNet, classes_task, least_squares

CPU = torch.device("cpu")
ODD = {"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(2, 1)}


def empty(path: Path | None = None) -> StoredStates:
    return StoredStates(StateStore(SlotFile(Layout.of(ODD), path), CPU))


def state_of(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, number) for name, value in ODD.items()}


def number_of(state: Any) -> int:
    """Return the argument of `state_of`, which all tensors of the state must hold."""
    assert {name: (v.shape, v.dtype) for name, v in state.items()} == {
        name: (v.shape, v.dtype) for name, v in ODD.items()
    }
    (number,) = {value for tensor in state.values() for value in tensor.flatten().tolist()}
    return int(number)


Changes = st.lists(st.dictionaries(st.integers(0, 30), st.integers(0, 99), max_size=8), max_size=12)


@given(Changes)
def test_states_in_memory_are_like_a_dictionary(changes: list[dict[int, Any]]) -> None:
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
        states = states.updated({10 * round + k: {} for k in range(10)})
        copied += states.layer_sizes()[0]  # the one layer that is new
    assert len(states) == 10_000
    assert copied < 10_000 * 14


@settings(max_examples=40)
@given(Changes, st.data())
def test_stored_states_are_like_a_dictionary(changes: list[dict[int, int]], data: Any) -> None:
    """Also those of earlier rounds, and where two runs continue from one."""
    known: list[tuple[StoredStates, dict[int, int]]] = [(empty(), {})]
    for changed in changes:
        states, plain = known[data.draw(st.integers(0, len(known) - 1))]
        after = states.updated({c: state_of(n) for c, n in changed.items()})
        known.append((after, {**plain, **changed}))
        if data.draw(st.booleans()):
            known.pop(data.draw(st.integers(0, len(known) - 1)))
        for old, expected in known:
            assert {c: number_of(s) for c, s in old.items()} == expected
            assert len(old) == len(expected)
        if not known:
            return


def test_clients_without_a_state_are_stacked_with_the_initial_one() -> None:
    states = empty().updated({5: state_of(5), 2: state_of(2)})
    rows = states.stacked([5, 9, 2, 0], state_of(7))
    plain = ClientStates.of({5: state_of(5), 2: state_of(2)}).stacked([5, 9, 2, 0], state_of(7))
    assert rows["a"][:, 0].tolist() == [5, 7, 2, 7]
    assert all(torch.equal(rows[name], plain[name]) for name in ODD)
    begun = empty().stacked([1], state_of(7))
    assert number_of({name: value[0] for name, value in begun.items()}) == 7


def test_states_are_read_into_memory_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    states = empty().updated({c: state_of(c) for c in range(9)}).updated({2: state_of(20)})
    monkeypatch.setattr(client_store, "COPIED_BYTES", 2 * states.store.file.layout.bytes)
    memory = states.in_memory()
    assert not isinstance(memory, StoredStates)
    assert {c: number_of(s) for c, s in memory.items()} == {**{c: c for c in range(9)}, 2: 20}
    assert not list(empty().in_memory())


def test_slots_are_reused_once_nothing_refers_to_them() -> None:
    rng = np.random.default_rng(0)
    states = empty()
    for number in range(300):
        cohort = rng.choice(40, 4, replace=False).tolist()
        states = states.updated({c: state_of(number) for c in cohort})
    gc.collect()
    assert len(states) == 40
    assert states.store.used_slots() <= 2 * 40
    assert len(states.store.file) * states.store.file.layout.bytes < 2**23
    assert states.store.capacity <= 3 * 40


def test_an_old_state_protects_its_slots() -> None:
    """A run can return to it, however many rounds come after."""
    old = empty().updated({c: state_of(c) for c in range(10)})
    states = old
    for number in range(50):
        states = states.updated({c: state_of(100 + number) for c in range(10)})
    gc.collect()
    assert [number_of(old[c]) for c in range(10)] == list(range(10))
    before = states.store.used_slots()
    del old
    gc.collect()
    assert states.store.used_slots() == before - 10


def test_changed_since() -> None:
    first = empty().updated({c: state_of(c) for c in range(9)})
    second = first.updated({3: state_of(1), 20: state_of(2)})
    assert second.changed_since(first) == {3, 20}
    assert second.changed_since({}) == {*range(9), 20}
    assert first.changed_since(first) == set()


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_owner_can_read_the_file(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "slots"
    states = empty(path).updated({1: state_of(1)})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    file = SlotFile(states.store.file.layout, path, exists)
    StoredStates(StateStore(file, CPU)).updated({2: state_of(2)})
    assert path.stat().st_mode & 0o777 == 0o600


def test_damage_is_noticed_when_a_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    states = empty(path=path).updated({1: state_of(1), 2: state_of(2)})
    data = bytearray(path.read_bytes())
    data[states.store.file.layout.bytes + 1] ^= 1
    path.write_bytes(data)
    assert number_of(states[1]) == 1
    with pytest.raises(fx.UsageError, match="is damaged"):
        states[2]


def test_a_full_disk_raises_and_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    states = empty().updated({1: state_of(1)})

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(fx.UsageError, match="No space left on device; free space"):
            states.updated({2: state_of(2)})
    gc.collect()
    assert states.store.used_slots() == 1
    assert number_of(states.updated({2: state_of(2)})[2]) == 2


def dense_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


TASKS = {
    "linear": least_squares(12),
    "dense": classes_task(dense_net, (10, 6, 14, 7, 8, 11)),
    "BatchNorm": classes_task(BatchNormNet, (10, 6, 14, 7, 8, 11)),
}


@pytest.mark.parametrize("make", [fx.scaffold, fx.scaffold_exp], ids=lambda make: make.__name__)
@pytest.mark.parametrize("engine", ["loop", "batched", "auto"])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_where_states_lie_changes_no_bit(task: Task, engine: str, make: Any) -> None:
    runs = [
        list(fx.simulate(task, make(), 8, 3, engine=engine, client_store=where))  # type: ignore[arg-type]
        for where in ("memory", "disk")
    ]
    for a, b in zip(*runs, strict=True):
        assert replace(a, seconds=0.0) == replace(b, seconds=0.0)
    memory, disk = (run[-1].state for run in runs)
    assert not isinstance(memory.clients, StoredStates)
    assert isinstance(disk.clients, StoredStates)
    assert torch.equal(memory.params, disk.params)
    assert list(memory.clients) == list(disk.clients)
    for client, state in memory.clients.items():
        assert torch.equal(state["control"], disk.clients[client]["control"])


@pytest.mark.parametrize("first", ["memory", "disk"])
def test_a_run_continues_with_its_states_elsewhere(first: Any) -> None:
    task = TASKS["dense"]
    whole = list(fx.simulate(task, fx.scaffold(), 6, 3))[-1]
    begun = list(fx.simulate(task, fx.scaffold(), 3, 3, client_store=first))[-1]
    other = "disk" if first == "memory" else "memory"
    *_, last = fx.simulate(task, fx.scaffold(), 6, 3, start=begun.state, client_store=other)  # type: ignore[arg-type]
    assert isinstance(last.state.clients, StoredStates) == (first == "memory")
    assert torch.equal(last.state.params, whole.state.params)


def test_auto_decides_again_where_a_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of the states, wherever they were before."""
    task = TASKS["dense"]
    for first in ("memory", "disk"):
        start = list(fx.simulate(task, fx.scaffold(), 2, 3, client_store=first))[-1].state
        for memory in (0, 2**40):
            monkeypatch.setattr(client_store, "memory_bytes", lambda device, memory=memory: memory)
            state = next(fx.simulate(task, fx.scaffold(), 3, 3, start=start)).state
            assert isinstance(state.clients, StoredStates) == (memory == 0)


def test_calls_that_share_a_file_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call that decided otherwise would overwrite the states that the first one wrote."""
    task = TASKS["dense"]
    size = 4 * task.objective.initial(0)[0].numel()
    monkeypatch.setattr(client_store, "memory_bytes", lambda device: 4 * 6 * size - 1)
    for clients, stored in ((None, False), (6, True)):
        store = ClientStore("auto", clients=clients)
        state = next(fx.simulate(task, fx.scaffold(), 1, 3, client_store=store)).state
        assert isinstance(state.clients, StoredStates) == stored


class Two(ProcessGroup):
    """Two processes on this machine, each of which stores all states."""

    local_world_size = 2


def test_auto_takes_a_file_where_states_may_outgrow_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = TASKS["dense"]
    size = 4 * task.objective.initial(0)[0].numel()
    for memory, rounds, stored in [
        (4 * 6 * size, 9, False),
        (4 * 6 * size - 1, 9, True),
        (4 * 3 * size, 1, False),  # three clients are all that can take part in a round of three
    ]:
        monkeypatch.setattr(client_store, "memory_bytes", lambda device, memory=memory: memory)
        state = next(fx.simulate(task, fx.scaffold(), rounds, 3)).state
        assert isinstance(state.clients, StoredStates) == stored
        state = next(fx.simulate(task, fx.scaffold(), rounds, 3, process_group=Two())).state
        assert isinstance(state.clients, StoredStates)
    monkeypatch.setattr(client_store, "memory_bytes", lambda device: 0)
    assert not next(fx.simulate(task, fx.fedexp(), 1, 3)).state.clients  # no client state


def test_slots_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    states = empty().updated({c: state_of(c) for c in range(6)}).updated({2: state_of(9)})
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, at, size, how: advised.append((at, size)))
    states.prefetch(np.array([1, 2, 7]))
    size = states.store.file.layout.bytes
    assert advised == [(slot * size, size) for slot in states.find(np.array([1, 2])).slots]
    assert states.find(np.array([2])).slots[0] >= 6  # the newest


def test_a_state_that_changes_its_shape_is_refused() -> None:
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(fx.UsageError, match=r"different shapes or types.*; let end_round"):
            empty().updated({1: state_of(1), 2: {**state_of(2), "a": other}})


def test_the_kind_of_store_is_checked_at_the_call() -> None:
    with pytest.raises(fx.UsageError, match="client_store is auto, memory or disk, not 'ram'"):
        fx.simulate(TASKS["dense"], fx.scaffold(), 1, client_store="ram")  # type: ignore[arg-type]
    assert ClientStore("disk").file is None
