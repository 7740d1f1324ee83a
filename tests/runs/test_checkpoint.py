"""Checkpoints hold everything, write only what changed, and are never half there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.engine import SimulationState
from fedexp.engine.client_store import ClientStates
from fedexp.runs import checkpoint
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    Checkpoint,
    Checkpoints,
    model_tensors,
    read_checkpoint,
)
from fedexp.runs.files import DamagedError

CPU = torch.device("cpu")


def odd_task() -> fx.tasks.Task:
    """BatchNorm, dropout, unequal clients: buffers of two kinds, and draws inside the model."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(60, 5)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, 3, 60))
    parts = np.split(np.arange(60), [5, 20, 30, 48])
    train = fx.data.Federation.from_parts({"x": x, "y": y}, parts)
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    task = fx.tasks.classification("odd", build, train, test={"x": x, "y": y})
    return replace(task, local=replace(task.local, steps=3, batch_size=8))


def float64_task() -> fx.tasks.Task:
    return fx.tasks.synthetic(clients=4, rows=3, dim=20)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def assert_same_state(a: SimulationState, b: SimulationState) -> None:
    assert (a.round, a.steps) == (b.round, b.steps)
    assert same(model_tensors(a), model_tensors(b))
    assert a.clients.keys() == b.clients.keys()
    assert all(same(a.clients[c], b.clients[c]) for c in a.clients)


@pytest.mark.parametrize("task", [odd_task(), float64_task()], ids=["BatchNorm", "float64"])
@pytest.mark.parametrize("make", [fx.scaffold_exp, fx.fedexp_m, fx.fedadam])
def test_a_run_goes_on_from_the_disk_bit_for_bit(
    task: fx.tasks.Task, make: Callable[[], fx.Algorithm], tmp_path: Path
) -> None:
    algorithm = make()
    through = list(fx.simulate(task, algorithm, 6, cohort=3))
    store = Checkpoints(tmp_path, None, None)
    for record in through[:3]:
        store.saw(record.state)
    store.write(through[2].state, 0, 0.0)
    _, state = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, through[2].state)
    rest = list(fx.simulate(task, algorithm, 6, cohort=3, start=state))
    assert_same_state(rest[-1].state, through[-1].state)
    for a, b in zip(rest, through[3:], strict=True):
        assert replace(a, seconds=0.0) == replace(b, seconds=0.0)


def walk(store: Checkpoints, rounds: int, cohort: int = 2) -> list[SimulationState]:
    """A SCAFFOLD run that checkpoints every round."""
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    states = []
    for record in fx.simulate(task, fx.scaffold(), rounds, cohort=cohort):
        store.saw(record.state)
        store.write(record.state, 10 * record.round, 0.0)
        states.append(record.state)
    return states


def test_only_changed_clients_are_written_and_stale_ones_do_not_pile_up(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    states = walk(store, 40)
    assert store.last is not None
    assert len(states[-1].clients) == 12
    newest = max(store.last.clients, key=lambda part: int(part.file.split("-")[1]))
    assert newest.clients  # what the last rounds changed is in files of their own
    assert len(store.last.clients) > 1
    assert sum(part.held for part in store.last.clients) <= 2 * 12
    assert sorted(c for part in store.last.clients for c in part.clients) == list(range(12))
    _, state = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, states[-1])
    _, before = read_checkpoint(tmp_path, BEFORE, CPU)
    assert_same_state(before, states[-2])
    kept = [store.last, Checkpoint.from_json(json.loads((tmp_path / BEFORE).read_text()))]
    on_disk = {path.name for path in tmp_path.glob("*.safetensors")}
    assert on_disk == kept[0].files | kept[1].files


def test_a_checkpoint_after_a_quiet_round_writes_no_client_again(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    last = walk(store, 3, cohort=12)[-1]
    store.saw(last)
    store.write(replace(last, round=4), 40, 0.0)
    assert not list(tmp_path.glob("checkpoint-4-clients-*"))
    _, state = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, replace(last, round=4))


def test_large_client_states_are_spread_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 500)  # a state has 160 bytes
    store = Checkpoints(tmp_path, None, None)
    last = walk(store, 1, cohort=12)[-1]
    assert store.last is not None
    assert [part.held for part in store.last.clients] == [3, 3, 3, 3]
    assert_same_state(read_checkpoint(tmp_path, NEWEST, CPU)[1], last)


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "empty json", "other json"])
def test_damage_is_noticed(harm: str, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    walk(store, 2)
    assert store.last is not None
    file = tmp_path / store.last.clients[-1].file
    data = file.read_bytes()
    if harm == "truncate":
        file.write_bytes(data[:-1])
    elif harm == "flip":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif harm == "remove":
        file.unlink()
    else:
        (tmp_path / NEWEST).write_text("" if harm == "empty json" else '{"format": 1}')
    with pytest.raises(DamagedError):
        read_checkpoint(tmp_path, NEWEST, CPU)
    assert read_checkpoint(tmp_path, BEFORE, CPU)[1].round == 1


def test_every_byte_of_the_list_of_files_matters(tmp_path: Path) -> None:
    """A digit that flips is JSON still, and would go on from another round."""
    store = Checkpoints(tmp_path, None, None)
    walk(store, 2)
    whole = (tmp_path / NEWEST).read_bytes()
    for at in range(len(whole) - 1):  # all but the line's end
        (tmp_path / NEWEST).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read_checkpoint(tmp_path, NEWEST, CPU)


def test_only_what_changed_is_looked_at() -> None:
    """Against the plain comparison, over many rounds and however the layers were merged."""
    rng = np.random.default_rng(0)
    states: list[ClientStates] = [ClientStates()]
    for _ in range(60):
        cohort = rng.choice(40, 3, replace=False).tolist()
        states.append(states[-1].updated({c: {"x": torch.zeros(1)} for c in cohort}))
    for old in range(0, 60, 7):
        for new in range(old, 61, 5):
            before, now = states[old], states[new]
            plain = {c for c in now if before.get(c) is not now[c]}
            assert now.changed_since(before) == plain == now.changed_since(dict(before))
