"""Checkpoints: complete, incremental, replaced atomically; client state in slot files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.cli.main import main
from fedexp.engine import SimulationState
from fedexp.engine.client_store import ClientStates, ClientStore, StoredStates
from fedexp.engine.slot_file import SlotFile
from fedexp.runs import RunInterrupted, checkpoint, execute
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    SLOTS,
    Checkpoint,
    Checkpoints,
    model_tensors,
    read_checkpoint,
)
from fedexp.runs.files import DamagedError, write_json
from fedexp.runs.spec import Spec
from tests.cli.helpers import RUN
from tests.runs.helpers import essence, nobody, stop_after, tiny

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
def test_a_run_resumes_from_the_disk_bit_for_bit(
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
    found = [store.last, Checkpoint.from_json(json.loads((tmp_path / BEFORE).read_text()))]
    on_disk = {path.name for path in tmp_path.glob("*.safetensors")}
    assert on_disk == found[0].files | found[1].files


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
    """A flipped digit is still JSON, and would resume from another round."""
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


def run(spec: Spec, folder: Path, where: Any = "disk", **more: Any) -> None:
    execute(spec, None, nobody, folder=folder, client_store=where, **more)


def stop_at(round: int, spec: Spec, folder: Path, where: Any = "disk") -> None:
    listen, stop = stop_after(round)
    with pytest.raises(RunInterrupted):
        execute(spec, None, listen, folder=folder, stop=stop, client_store=where)


def states_in(folder: Path, rounds: int) -> Iterator[SimulationState]:
    """A SCAFFOLD run of three of twelve clients, whose states are stored in the folder."""
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    where = ClientStore("disk", folder / SLOTS)
    for record in fx.simulate(task, fx.scaffold(), rounds, cohort=3, client_store=where):
        yield record.state


def in_memory(state: SimulationState) -> SimulationState:
    return replace(state, clients={c: dict(found) for c, found in state.clients.items()})


@pytest.mark.parametrize("before", ["memory", "disk"])
@pytest.mark.parametrize("after", ["memory", "disk"])
def test_a_run_is_the_same_wherever_client_state_is_stored(
    before: str, after: str, tmp_path: Path
) -> None:
    spec = tiny("scaffold-exp", 9)
    run(spec, tmp_path / "whole", where="memory")
    stop_at(4, spec, tmp_path / "a", before)
    assert (tmp_path / "a" / SLOTS).exists() == (before == "disk")
    stop_at(7, spec, tmp_path / "a", after)
    run(spec, tmp_path / "a", after)
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")
    assert not (tmp_path / "a" / SLOTS).exists()  # training is over


def test_no_slot_of_the_two_checkpoints_is_used_again(tmp_path: Path) -> None:
    """However many rounds come after them; and what is no longer referred to is."""
    store = Checkpoints(tmp_path, None, None)
    written: list[SimulationState] = []
    for state in states_in(tmp_path, 60):
        if state.round % 7 == 0:
            store.write(state, 0, 0.0)
            written.append(in_memory(state))
        elif len(written) > 1:
            assert_same_state(in_memory(read_checkpoint(tmp_path, NEWEST, CPU)[1]), written[-1])
            assert_same_state(in_memory(read_checkpoint(tmp_path, BEFORE, CPU)[1]), written[-2])
    assert isinstance(state.clients, StoredStates)
    highest = max(int(layer.slots.max()) for layer in state.clients.layers)
    assert highest < 80  # slots for twelve clients; 180 were written


def test_a_resumed_run_spares_the_checkpoint_before(tmp_path: Path) -> None:
    """It is what is left should the newest be damaged."""
    *_, first = states_in(tmp_path, 3)
    store = Checkpoints(tmp_path, None, None)
    store.write(first, 0, 0.0)
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    second = list(fx.simulate(task, fx.scaffold(), 8, cohort=3, start=first))[-1].state
    store.write(second, 0, 0.0)
    expected = [in_memory(second), in_memory(first)]
    del store, first, second
    last, state = read_checkpoint(tmp_path, NEWEST, CPU)
    store = Checkpoints(tmp_path, last, state)
    for record in fx.simulate(task, fx.scaffold(), 30, cohort=3, start=state):
        store.saw(record.state)
    for name, before in zip((NEWEST, BEFORE), expected, strict=True):
        assert_same_state(in_memory(read_checkpoint(tmp_path, name, CPU)[1]), before)


def test_a_checkpoint_writes_what_is_new_about_the_slots_only(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    parts = []
    for state in states_in(tmp_path, 20):
        store.write(state, 0, 0.0)
        assert store.last is not None
        assert store.last.slots is not None
        assert not store.last.clients
        parts.append(store.last.slots.layers)
        assert isinstance(state.clients, StoredStates)
        assert len(state.clients.layers) == len(parts[-1])
    again = [len(set(old) & set(new)) for old, new in pairwise(parts)]
    assert sum(again) > 5
    on_disk = {path.name for path in tmp_path.glob("checkpoint-*.safetensors")}
    assert store.last is not None
    assert on_disk | {SLOTS} == store.last.files | _files(tmp_path)


def _files(folder: Path) -> set[str]:
    return Checkpoint.from_json(json.loads((folder / BEFORE).read_bytes())).files


def test_states_are_on_the_disk_before_anything_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(path: Path, *more: Any, **options: Any) -> None:
        events.append(path.name)
        write_json(path, *more, **options)

    monkeypatch.setattr(SlotFile, "sync", lambda self: events.append("slots"))
    monkeypatch.setattr(checkpoint, "write_json", noted)
    store = Checkpoints(tmp_path, None, None)
    for state in states_in(tmp_path, 2):
        store.write(state, 0, 0.0)
    assert events == ["slots", NEWEST, "slots", BEFORE, NEWEST]


def test_the_command_line_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    placed = ClientStore.store

    def noted(self: ClientStore, *arguments: Any) -> Any:
        found.append(self.where)
        return placed(self, *arguments)

    monkeypatch.setattr(ClientStore, "store", noted)
    command = [*RUN, "--algorithm", "scaffold", "--quiet"]
    assert main([*command, "--client-states", "disk"]) == 0
    assert found[-1] == "disk"
    assert main([*command, "--restart"]) == 0
    assert found[-1] == "auto"


@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_slots_that_are_gone_are_noticed(harm: str, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    for state in states_in(tmp_path, 2):
        store.write(state, 0, 0.0)
    assert isinstance(state.clients, StoredStates)
    if harm == "remove":
        (tmp_path / SLOTS).unlink()
    else:
        (tmp_path / SLOTS).write_bytes(bytes(state.clients.store.file.layout.bytes))
    with pytest.raises(DamagedError, match=SLOTS):
        read_checkpoint(tmp_path, NEWEST, CPU)


def test_a_flipped_bit_ends_the_run_in_one_line(tmp_path: Path) -> None:
    spec = tiny("scaffold", 40)
    stop_at(20, spec, tmp_path / "a")
    path = tmp_path / "a" / SLOTS
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(fx.UsageError, match=r"is damaged .* start over with"):
        run(spec, tmp_path / "a")
    run(spec, tmp_path / "a", restart=True)
    run(spec, tmp_path / "whole")
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")


def test_states_come_back_on_the_device_they_are_wanted_on(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, None, None)
    *_, state = states_in(tmp_path, 2)
    store.write(state, 0, 0.0)
    meta = read_checkpoint(tmp_path, NEWEST, torch.device("meta"))[1].clients
    assert isinstance(meta, StoredStates)
    assert {found["control"].device.type for found in meta.values()} == {"meta"}
