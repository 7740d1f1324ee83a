"""Clients' states in a file of slots: checkpoints refer to them, and are as good as copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fedexp as fx
from fedexp.cli.main import main
from fedexp.engine import SimulationState
from fedexp.engine.client_store import ClientStore, StoredStates
from fedexp.engine.slot_file import SlotFile
from fedexp.runs import Stopped, checkpoint, execute
from fedexp.runs.checkpoint import BEFORE, NEWEST, SLOTS, Checkpoint, Checkpoints, read_checkpoint
from fedexp.runs.files import DamagedError, write_json
from fedexp.runs.spec import Spec
from tests.cli.helpers import RUN
from tests.runs.helpers import essence, nobody, stop_after, tiny
from tests.runs.test_checkpoint import CPU, assert_same_state


def run(spec: Spec, folder: Path, keep: Any = "disk", **more: Any) -> None:
    execute(spec, None, nobody, folder=folder, client_store=keep, **more)


def stop_at(round: int, spec: Spec, folder: Path, keep: Any = "disk") -> None:
    listen, wish = stop_after(round)
    with pytest.raises(Stopped):
        execute(spec, None, listen, folder=folder, stop=wish, client_store=keep)


def states_in(folder: Path, rounds: int) -> Iterator[SimulationState]:
    """A SCAFFOLD run of three of twelve clients, whose states lie in the folder."""
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    keep = ClientStore("disk", folder / SLOTS)
    for record in fx.simulate(task, fx.scaffold(), rounds, cohort=3, client_store=keep):
        yield record.state


def in_memory(state: SimulationState) -> SimulationState:
    return replace(state, clients={c: dict(kept) for c, kept in state.clients.items()})


@pytest.mark.parametrize("before", ["memory", "disk"])
@pytest.mark.parametrize("after", ["memory", "disk"])
def test_a_run_is_the_same_wherever_its_states_lie(before: str, after: str, tmp_path: Path) -> None:
    spec = tiny("scaffold-exp", 9)
    run(spec, tmp_path / "whole", keep="memory")
    stop_at(4, spec, tmp_path / "a", before)
    assert (tmp_path / "a" / SLOTS).exists() == (before == "disk")
    stop_at(7, spec, tmp_path / "a", after)
    run(spec, tmp_path / "a", after)
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")
    assert not (tmp_path / "a" / SLOTS).exists()  # nobody trains any more


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
    assert state.clients.store._users.size < 80  # slots for twelve clients; 180 were written


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


def test_the_command_line_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept: list[str] = []
    placed = ClientStore.store

    def noted(self: ClientStore, *arguments: Any) -> Any:
        kept.append(self.where)
        return placed(self, *arguments)

    monkeypatch.setattr(ClientStore, "store", noted)
    command = [*RUN, "--algorithm", "scaffold", "--quiet"]
    assert main([*command, "--client-states", "disk"]) == 0
    assert kept[-1] == "disk"
    assert main([*command, "--restart"]) == 0
    assert kept[-1] == "auto"


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
    assert {kept["control"].device.type for kept in meta.values()} == {"meta"}
