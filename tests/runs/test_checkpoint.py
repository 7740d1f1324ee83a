"""Checkpoints: complete, incremental, replaced atomically; client state in slot files."""

from __future__ import annotations

import gc
import json
import weakref
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
from fedexp.engine import SimulationState, client_store
from fedexp.engine.client_store import ClientStates, ClientStore, StoredStates
from fedexp.engine.slot_file import SlotFile
from fedexp.errors import DamagedError
from fedexp.experiment import Experiment
from fedexp.privacy import CentralPrivacy, LocalPrivacy, Privacy
from fedexp.runs import checkpoint
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    SLOTS,
    Checkpoint,
    Checkpoints,
    model_tensors,
    read_checkpoint,
    stored_in,
)
from fedexp.runs.folder import RunWarning
from fedexp.storage import write_json
from tests.runs.helpers import essence, execute_in, interrupted, tiny

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
    store = Checkpoints(tmp_path)
    store.write(through[2].state, 0, "", 0.0)
    _, state, _ = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, through[2].state)
    rest = list(fx.simulate(task, algorithm, 6, cohort=3, start=state))
    assert_same_state(rest[-1].state, through[-1].state)
    for a, b in zip(rest, through[3:], strict=True):
        assert replace(a, seconds=0.0) == replace(b, seconds=0.0)


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
@pytest.mark.parametrize(
    "privacy",
    [
        CentralPrivacy(1.0, 1e-3, epsilon=8.0),
        CentralPrivacy(1.0, 1e-3, noise_multiplier=1.5, sampling="poisson"),
        LocalPrivacy(1.0, 1e-3, epsilon=8.0, rounds=6),
    ],
    ids=["budget", "poisson", "local"],
)
def test_a_private_run_that_resumes_reports_what_it_would_have(
    privacy: Privacy, tmp_path: Path
) -> None:
    experiment = tiny("fedexp", privacy=privacy)
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, tmp_path / "parts", 3, checkpoint_every=0.0)
    execute_in(tmp_path / "parts", experiment)
    whole, parts = essence(tmp_path / "whole"), essence(tmp_path / "parts")
    assert parts == whole
    assert whole["rows"][-1]["epsilon"] > whole["rows"][2]["epsilon"] > 0


def checkpointed(store: Checkpoints, rounds: int, cohort: int = 2) -> list[SimulationState]:
    """A SCAFFOLD run with client state in memory that checkpoints every round."""
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    states = []
    for record in fx.simulate(task, fx.scaffold(), rounds, cohort=cohort):
        store.write(record.state, 10 * record.round, "", 0.0)
        states.append(record.state)
    return states


def slot_numbers(stored: StoredStates) -> dict[int, int]:
    clients = np.array(list(stored))
    return dict(zip(clients.tolist(), stored.find(clients).slots.tolist(), strict=True))


def stored(folder: Path, name: str = NEWEST) -> StoredStates:
    found = read_checkpoint(folder, name, CPU)[1].clients
    assert isinstance(found, StoredStates)
    return found


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of states in every write to a slot file."""
    found: list[int] = []
    write = SlotFile.write

    def noted(self: SlotFile, slots: Any, rows: Any) -> Any:
        found.append(len(rows))
        return write(self, slots, rows)

    monkeypatch.setattr(SlotFile, "write", noted)
    return found


def test_only_changed_clients_are_written_and_stale_ones_do_not_pile_up(
    tmp_path: Path, writes: list[int]
) -> None:
    store = Checkpoints(tmp_path)
    states = checkpointed(store, 40)
    assert store.last is not None
    assert len(states[-1].clients) == 12
    assert writes == [2] * 40  # the cohort
    _, state, _ = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, states[-1])
    _, before, _ = read_checkpoint(tmp_path, BEFORE, CPU)
    assert_same_state(before, states[-2])
    now, then = slot_numbers(stored(tmp_path)), slot_numbers(stored(tmp_path, BEFORE))
    assert sum(now[client] != then[client] for client in now) == 2
    assert max(now.values()) < 4 * 12
    found = [store.last, Checkpoint.from_json(json.loads((tmp_path / BEFORE).read_text()))]
    on_disk = {path.name for path in tmp_path.glob("*.safetensors")}
    assert on_disk | {SLOTS} == found[0].files | found[1].files


def test_a_checkpoint_after_a_quiet_round_writes_no_client_again(
    tmp_path: Path, writes: list[int]
) -> None:
    store = Checkpoints(tmp_path)
    last = checkpointed(store, 3, cohort=12)[-1]
    del writes[:]
    store.write(replace(last, round=4), 40, "", 0.0)
    assert not writes
    assert not list(tmp_path.glob("checkpoint-4-slots-*"))
    _, state, _ = read_checkpoint(tmp_path, NEWEST, CPU)
    assert_same_state(state, replace(last, round=4))


def test_large_client_states_are_copied_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[int]
) -> None:
    monkeypatch.setattr(client_store, "COPIED_BYTES", 500)  # a state has 160 bytes
    store = Checkpoints(tmp_path)
    last = checkpointed(store, 1, cohort=12)[-1]
    assert writes == [3, 3, 3, 3]
    assert_same_state(read_checkpoint(tmp_path, NEWEST, CPU)[1], last)
    assert_same_state(replace(last, clients=stored(tmp_path).in_memory()), last)


def test_no_state_of_an_earlier_round_stays_in_memory(tmp_path: Path) -> None:
    """Client state may fill a quarter of the memory; a second copy of it would fill another."""
    store = Checkpoints(tmp_path)
    seen: list[weakref.ref[Tensor]] = []
    task = fx.tasks.synthetic(clients=4, rows=3, dim=20)
    for record in fx.simulate(task, fx.scaffold(), 6, engine="loop"):
        seen += [weakref.ref(found["control"]) for found in record.state.clients.values()]
        store.saw(record.state)
        if record.round % 2:
            store.write(record.state, 0, "", 0.0)
    gc.collect()
    assert sum(found() is not None for found in seen) <= 2 * 4


ODD_TYPES = {
    "half": torch.arange(3).to(torch.bfloat16),
    "flag": torch.tensor(True),
    "wide": torch.tensor([1.5 + 2j], dtype=torch.complex128),
    "none": torch.zeros(0, 4),
    "count": torch.tensor([[7]]),
}


def test_states_of_any_type_come_back(tmp_path: Path) -> None:
    start = next(iter(fx.simulate(float64_task(), fx.fedavg(), 1))).state
    grown = {
        name: value.clone().requires_grad_(name == "half") for name, value in ODD_TYPES.items()
    }
    state = replace(start, clients={3: grown, 5: ODD_TYPES})
    Checkpoints(tmp_path).write(state, 0, "", 0.0)
    assert_same_state(read_checkpoint(tmp_path, NEWEST, CPU)[1], state)


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_states_of_several_shapes_are_refused_in_one_line(other: Tensor, tmp_path: Path) -> None:
    start = next(iter(fx.simulate(float64_task(), fx.fedavg(), 1))).state
    clients = {1: {"control": torch.zeros(3)}, 2: {"control": other}}
    with pytest.raises(fx.UsageError, match=r"different shapes or types.*; let end_round return"):
        Checkpoints(tmp_path).write(replace(start, clients=clients), 0, "", 0.0)


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "empty json", "other json"])
def test_damage_is_noticed(harm: str, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    checkpointed(store, 2)
    assert store.last is not None
    assert store.last.slots is not None
    file = tmp_path / store.last.slots.layers[0].file
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
    store = Checkpoints(tmp_path)
    checkpointed(store, 2)
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


def run(experiment: Experiment, folder: Path, where: Any = "disk", **more: Any) -> None:
    execute_in(folder, experiment, client_store=where, **more)


def stop_at(round: int, experiment: Experiment, folder: Path, where: Any = "disk") -> None:
    interrupted(experiment, folder, round, client_store=where)


def states_in(folder: Path, rounds: int) -> Iterator[SimulationState]:
    """A SCAFFOLD run of three of twelve clients, whose states are stored in the folder."""
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    where = ClientStore("disk", folder / SLOTS)
    for record in fx.simulate(task, fx.scaffold(), rounds, cohort=3, client_store=where):
        yield record.state


def in_memory(state: SimulationState) -> SimulationState:
    return replace(state, clients={c: dict(found) for c, found in state.clients.items()})


@pytest.mark.parametrize("before", ["memory", "disk"])
@pytest.mark.parametrize("after", ["memory", "disk", "auto"])
def test_a_run_is_the_same_wherever_client_state_is_stored(
    before: str, after: str, tmp_path: Path
) -> None:
    experiment = tiny("scaffold-exp", 9)
    run(experiment, tmp_path / "whole", where="memory")
    stop_at(4, experiment, tmp_path / "a", before)
    stop_at(7, experiment, tmp_path / "a", after)
    run(experiment, tmp_path / "a", after)
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")
    assert not (tmp_path / "a" / SLOTS).exists()  # training is over


def test_no_slot_of_the_two_checkpoints_is_used_again(tmp_path: Path) -> None:
    """However many rounds come after them; and what is no longer referred to is."""
    store = Checkpoints(tmp_path)
    written: list[SimulationState] = []
    for state in states_in(tmp_path, 60):
        if state.round % 7 == 0:
            store.write(state, 0, "", 0.0)
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
    store = Checkpoints(tmp_path)
    store.write(first, 0, "", 0.0)
    task = fx.tasks.synthetic(clients=12, rows=3, dim=20)
    second = list(fx.simulate(task, fx.scaffold(), 8, cohort=3, start=first, client_store="disk"))[
        -1
    ].state
    store.write(second, 0, "", 0.0)
    expected = [in_memory(second), in_memory(first)]
    del store, first, second
    last, state, _ = read_checkpoint(tmp_path, NEWEST, CPU)
    store = Checkpoints(tmp_path, last, stored_in(state.clients, tmp_path))
    how: Any = {"start": state, "client_store": "disk"}
    for record in fx.simulate(task, fx.scaffold(), 30, cohort=3, **how):
        store.saw(record.state)
    for name, before in zip((NEWEST, BEFORE), expected, strict=True):
        assert_same_state(in_memory(read_checkpoint(tmp_path, name, CPU)[1]), before)


def test_a_checkpoint_writes_what_is_new_about_the_slots_only(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    parts = []
    for state in states_in(tmp_path, 20):
        store.write(state, 0, "", 0.0)
        assert store.last is not None
        assert store.last.slots is not None
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
    store = Checkpoints(tmp_path)
    for state in states_in(tmp_path, 2):
        store.write(state, 0, "", 0.0)
    assert events == ["slots", NEWEST, "slots", BEFORE, NEWEST]


def test_the_command_line_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    placed = ClientStore.store

    def noted(self: ClientStore, *arguments: Any) -> Any:
        found.append(self.where)
        return placed(self, *arguments)

    monkeypatch.setattr(ClientStore, "store", noted)
    command = ["run", "toy", "--rounds", "2", "--algorithm", "scaffold", "--quiet"]
    assert main([*command, "--client-states", "disk"]) == 0
    assert found[-1] == "disk"
    assert main([*command, "--restart"]) == 0
    assert found[-1] == "auto"


@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_slots_that_are_gone_are_noticed(harm: str, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    for state in states_in(tmp_path, 2):
        store.write(state, 0, "", 0.0)
    assert isinstance(state.clients, StoredStates)
    if harm == "remove":
        (tmp_path / SLOTS).unlink()
    else:
        (tmp_path / SLOTS).write_bytes(bytes(state.clients.store.file.layout.bytes))
    with pytest.raises(DamagedError, match=SLOTS):
        read_checkpoint(tmp_path, NEWEST, CPU)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("disk", r"is damaged"),
        ("memory", r"slots is not as it was written, and"),
    ],
)
def test_flipped_bits_end_the_run_in_one_line(where: str, message: str, tmp_path: Path) -> None:
    experiment = tiny("scaffold", 40)
    stop_at(20, experiment, tmp_path / "a", where)
    path = tmp_path / "a" / SLOTS
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(fx.UsageError, match=message):
        run(experiment, tmp_path / "a", where)
    run(experiment, tmp_path / "a", where, restart=True)
    run(experiment, tmp_path / "whole")
    assert essence(tmp_path / "a") == essence(tmp_path / "whole")


@pytest.mark.parametrize("where", ["memory", "auto"])
def test_a_damaged_state_resumes_from_the_checkpoint_before(where: str, tmp_path: Path) -> None:
    """Where states are read into memory, all are checked before the first round."""
    experiment, folder = tiny("scaffold-exp", 9), tmp_path / "a"
    run(experiment, tmp_path / "whole")
    interrupted(experiment, folder, 5, client_store=where, checkpoint_every=0)
    now, then = slot_numbers(stored(folder)), slot_numbers(stored(folder, BEFORE))
    changed = next(slot for client, slot in now.items() if then.get(client) != slot)
    data = bytearray((folder / SLOTS).read_bytes())
    data[changed * stored(folder).store.file.layout.bytes] ^= 1
    (folder / SLOTS).write_bytes(data)
    with pytest.warns(RunWarning, match=rf"{SLOTS} is not as it was written.*of round 4"):
        run(experiment, folder, where)
    assert essence(folder) == essence(tmp_path / "whole")


@pytest.mark.parametrize(
    ("where", "memory", "resident"),
    [("memory", 0, True), ("auto", 2**40, True), ("auto", 0, False), ("disk", 2**40, False)],
)
def test_resuming_decides_where_states_are_stored_and_writes_none_again(
    where: str,
    memory: int,
    resident: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: list[int],
) -> None:
    """As at the start of a run, whatever the run before decided."""
    experiment, folder = tiny("scaffold", 9), tmp_path / "a"
    stop_at(4, experiment, folder, "memory" if not resident else "disk")
    assert len(stored(folder)) == 4
    del writes[:]
    monkeypatch.setattr(client_store, "memory_bytes", lambda device: memory)
    found: list[bool] = []
    store = ClientStore.store

    def noted(self: ClientStore, *arguments: Any) -> Any:
        states = store(self, *arguments)
        found.append(not isinstance(states, StoredStates))
        return states

    monkeypatch.setattr(ClientStore, "store", noted)
    stop_at(5, experiment, folder, where)
    assert set(found) == {resident}
    assert writes == [3]  # the cohort of the one round


def test_states_come_back_on_the_device_they_are_wanted_on(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    *_, state = states_in(tmp_path, 2)
    store.write(state, 0, "", 0.0)
    meta = read_checkpoint(tmp_path, NEWEST, torch.device("meta"))[1].clients
    assert isinstance(meta, StoredStates)
    for states in (meta, meta.in_memory()):
        assert {found["control"].device.type for found in states.values()} == {"meta"}


def test_earlier_states_stay_in_the_files_that_they_were_written_to(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    states = [record.state for record in fx.simulate(float64_task(), fx.fedexp_m(), 6)]
    for k, state in enumerate(states):
        store.write(state, 0, "", 0.0, earlier=tuple(states[max(0, k - 2) : k]))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        f"checkpoint-{round}.safetensors" for round in (3, 4, 5, 6)
    }
    for name, last in ((NEWEST, 5), (BEFORE, 4)):
        _, state, earlier = read_checkpoint(tmp_path, name, CPU)
        for ours, theirs in zip((*earlier, state), states[last - 2 : last + 1], strict=True):
            assert_same_state(ours, replace(theirs, clients={}))
    checkpoint, state, earlier = read_checkpoint(tmp_path, NEWEST, CPU)
    store = Checkpoints(tmp_path, checkpoint, earlier=earlier)
    other = replace(states[0], round=1)  # was never written by this writer
    store.write(replace(state, round=7), 0, "", 0.0, earlier=(*earlier[1:], other))
    now = read_checkpoint(tmp_path, NEWEST, CPU)[2]
    for ours, theirs in zip(now, (states[4], states[0]), strict=True):
        assert_same_state(ours, replace(theirs, clients={}))
    assert (tmp_path / "checkpoint-7-earlier-1.safetensors").exists()
    store.settle(7)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["checkpoint-7.safetensors"]
    assert read_checkpoint(tmp_path, NEWEST, CPU)[2] == ()


def test_a_damaged_earlier_state_is_noticed(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    states = [record.state for record in fx.simulate(float64_task(), fx.fedexp_m(), 3)]
    for k, state in enumerate(states):
        store.write(state, 0, "", 0.0, earlier=tuple(states[max(0, k - 1) : k]))
    path = tmp_path / "checkpoint-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedError, match=r"checkpoint-2\.safetensors is not as it was written"):
        read_checkpoint(tmp_path, NEWEST, CPU)
