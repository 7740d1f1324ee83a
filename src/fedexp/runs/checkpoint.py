"""Checkpoints: the last state of a run on the disk, always complete, written incrementally.

Tensors are written to files of new names; then `checkpoint.json`, which lists them with their
digests and a digest of itself, is replaced atomically; then files that nothing refers to are
removed. The checkpoint before it stays on the disk, in case the newest is damaged.

Client state (SCAFFOLD's control variates) can be gigabytes, and a round changes little of it. It is
in a slot file (`engine/slot_file.py`): a checkpoint writes the states that changed to free slots,
unless the run stores client state there itself, syncs the file, and stores which client has which
slot. The writer holds references to the states of both checkpoints, so that their slots are not
reused.

A server of real clients also stores a few earlier states, to which it can fall back. Each stays in
the file that was written when it was the newest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.engine.client_store import (
    ClientStates,
    Layer,
    StateStore,
    StoredStates,
    copy_states,
)
from fedexp.engine.slot_file import Layout, SlotFile
from fedexp.errors import DamagedError
from fedexp.objective import Buffers
from fedexp.privacy import Release
from fedexp.runs.records import is_count, is_duration, is_part_name
from fedexp.storage import PRIVATE, from_bytes, parse_json, to_bytes, write_bytes, write_json

FORMAT = 3
NEWEST, BEFORE = "checkpoint.json", "checkpoint-before.json"
SLOTS = "checkpoint-clients.slots"
CPU = torch.device("cpu")
States = tuple[SimulationState, ...]


def read_checkpoint(
    folder: Path, name: str, device: torch.device
) -> tuple[Checkpoint, SimulationState, States]:
    """Return a checkpoint, its state and earlier ones; raise `DamagedError` if any byte changed."""
    try:
        checkpoint = Checkpoint.from_json(parse_json((folder / name).read_bytes()))
        tensors = _read_part(folder, checkpoint.model, device)
        clients: Mapping[int, Tensors] = {}
        if (slots := checkpoint.slots) is not None:
            file = SlotFile(Layout(slots.layout), folder / slots.file, exists=True)
            clients = _read_slots(folder, slots, StateStore(file, device))
        earlier = tuple(
            state_from(round, steps, _read_part(folder, part, device), {})
            for round, steps, part in checkpoint.earlier
        )
        return checkpoint, state_from(checkpoint.round, checkpoint.steps, tensors, clients), earlier
    except DamagedError:
        raise
    except OSError as error:
        raise DamagedError(f"{error.strerror}: {Path(error.filename or name).name}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{name} cannot be read ({type(error).__name__})") from None


def _read_slots(folder: Path, slots: Slots, store: StateStore) -> StoredStates:
    """Return the client state that a checkpoint refers to in the slots of a store."""
    layers = [_layer(_read_part(folder, part, CPU)) for part in slots.layers]
    if any(int(layer.slots.max(initial=-1)) >= len(store.file) for layer in layers):
        raise DamagedError(f"{SLOTS} is shorter than it was")
    return StoredStates(store, tuple(map(store.hold, layers)))


def _read_part(folder: Path, part: Part, device: torch.device) -> dict[str, torch.Tensor]:
    data = (folder / part.file).read_bytes()
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise DamagedError(f"{part.file} is not as it was written")
    return from_bytes(data, device)


class Checkpoints:
    """Writes the checkpoints of one run; tracks which clients changed since the last one.

    Args:
        folder: the run folder.
        last: the checkpoint that is there; None without one.
        stored: its client state in the folder's slot file, if any.
        clients: the same where the run stores it, in memory or in that file.
        earlier: the earlier states of that checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        last: Checkpoint | None = None,
        stored: StoredStates | None = None,
        clients: Mapping[int, Tensors] | None = None,
        earlier: States = (),
    ) -> None:
        self.folder, self.last = folder, last
        parts = [] if last is None else [part for _, _, part in last.earlier]
        self._parts = WeakKeyDictionary(zip(earlier, parts, strict=True))
        # the states of both checkpoints on the disk, so that their slots are not reused
        self._newest, self._before = stored, _before(folder, stored)
        self._clients = (stored or {}) if clients is None else clients
        self._changed: set[int] = set()

    def saw(self, state: SimulationState) -> None:
        """Track which clients have a new state after a round: a new one is another object.

        Called every round, since comparing with the last checkpoint would hold its states in
        memory.
        """
        if state.clients is self._clients:
            return
        if stored_in(state.clients, self.folder) is None:
            self._changed |= ClientStates.of(state.clients).changed_since(self._clients)
        self._clients = state.clients

    def write(
        self,
        state: SimulationState,
        records_bytes: int,
        records_sha256: str,
        seconds: float,
        final: bool = False,
        earlier: States = (),
    ) -> None:
        """Write the state as the newest checkpoint; the one that was newest becomes the one before.

        Args:
            state: the state.
            records_bytes: size of `records.jsonl` up to its round.
            records_sha256: digest of those bytes.
            seconds: training time so far.
            final: whether the run is over, so that client state is not needed any more.
            earlier: states to be stored with it.
        """
        if self.last is not None and self.last.round == state.round:
            return
        self.saw(state)
        stem = f"checkpoint-{state.round}"
        model = self._part(state, stem)
        parts = (self._part(each, f"{stem}-earlier-{k}") for k, each in enumerate(earlier))
        before = tuple((s.round, s.steps, p) for s, p in zip(earlier, parts, strict=True))
        stored = None if final else self._stored(state.clients)
        slots = None if stored is None else self._slots(stored, state.round)
        ends = (state.round, state.steps, seconds, records_bytes, records_sha256)
        written = Checkpoint(*ends, model, slots, before)
        if self.last is not None:
            write_json(self.folder / BEFORE, self.last.to_json(), indent=None, mode=PRIVATE)
        write_json(self.folder / NEWEST, written.to_json(), indent=None, mode=PRIVATE)
        self._remove_unless(written.files | (self.last.files if self.last else set()))
        self.last, self._changed = written, set()
        self._newest, self._before = stored, self._newest

    def settle(self, rounds: int) -> None:
        """Remove all but the newest state, and client state, as the run is over.

        Called before the result is written, so that a killed process leaves nothing behind: a run
        that resumes from its last round needs no client state. Does nothing where the newest
        checkpoint is of an earlier round, since that one may still be needed.
        """
        if self.last is None or self.last.round != rounds:
            return
        (self.folder / BEFORE).unlink(missing_ok=True)
        if self.last.slots or self.last.earlier:
            self.last = replace(self.last, slots=None, earlier=())
            write_json(self.folder / NEWEST, self.last.to_json(), indent=None, mode=PRIVATE)
        self._remove_unless(self.last.files)

    def _stored(self, clients: Mapping[int, Tensors]) -> StoredStates | None:
        """Return the states in the folder's slot file, with those that changed written to it."""
        if not clients:
            return None
        if (stored := stored_in(clients, self.folder)) is not None:
            return stored
        if self._newest is not None:
            return copy_states(clients, sorted(self._changed), self._newest)
        layout = Layout.of(clients[next(iter(clients))])
        empty = StoredStates(StateStore(SlotFile(layout, self.folder / SLOTS), CPU))
        return copy_states(clients, list(clients), empty)

    def _slots(self, stored: StoredStates, round: int) -> Slots:
        """Sync the slots, then write the layers that are new; return all of them."""
        stored.store.file.sync()
        written: dict[int, Part] = {}
        if self._newest is not None and self.last is not None and self.last.slots is not None:
            ids = (id(layer) for layer in self._newest.layers)
            written = dict(zip(ids, self.last.slots.layers, strict=True))
        layers = tuple(
            written.get(id(layer))
            or self._write_part(f"checkpoint-{round}-slots-{k}", layer_tensors(layer))
            for k, layer in enumerate(stored.layers)
        )
        return Slots(SLOTS, stored.store.file.layout.tensors, layers)

    def _part(self, state: SimulationState, stem: str) -> Part:
        """Return the file of a state's model: one of the last checkpoint, or a new one."""
        part = self._parts.get(state)
        if part is None or self.last is None or part.file not in self.last.files:
            part = self._parts[state] = self._write_part(stem, model_tensors(state))
        return part

    def _write_part(self, stem: str, named: dict[str, torch.Tensor]) -> Part:
        data = to_bytes(named)
        name = f"{stem}.safetensors"
        write_bytes(self.folder / name, data, PRIVATE)
        return Part(name, hashlib.sha256(data).hexdigest())

    def _remove_unless(self, wanted: set[str]) -> None:
        for pattern in ("checkpoint-*.safetensors", SLOTS):
            for path in self.folder.glob(pattern):
                if path.name not in wanted:
                    path.unlink()


def _before(folder: Path, newest: StoredStates | None) -> StoredStates | None:
    """Return the client state of the checkpoint before, where it shares the store of the newest."""
    if newest is None:
        return None
    with suppress(OSError, DamagedError, ValueError, KeyError, TypeError):
        checkpoint = Checkpoint.from_json(parse_json((folder / BEFORE).read_bytes()))
        if checkpoint.slots is not None:
            return _read_slots(folder, checkpoint.slots, newest.store)
    return None


@dataclass(frozen=True)
class Part:
    """A file of tensors.

    Attributes:
        file: its name.
        sha256: its digest.
    """

    file: str
    sha256: str


@dataclass(frozen=True)
class Slots:
    """Client state in a slot file.

    Attributes:
        file: name of the slot file.
        layout: name, shape and type of the tensors in a slot.
        layers: files that map clients to slots and checksums, newest first.
    """

    file: str
    layout: tuple[tuple[str, tuple[int, ...], str], ...]
    layers: tuple[Part, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The content of `checkpoint.json`: a round, where its records end, and its files.

    Each of the earlier states has its round, its steps and its file.
    """

    round: int
    steps: int
    seconds: float
    records_bytes: int
    records_sha256: str
    model: Part
    slots: Slots | None = None  # client state
    earlier: tuple[tuple[int, int, Part], ...] = ()

    @property
    def files(self) -> set[str]:
        """The names of all files that belong to the checkpoint."""
        names = {self.model.file, *(part.file for _, _, part in self.earlier)}
        if self.slots is not None:
            names |= {self.slots.file, *(part.file for part in self.slots.layers)}
        return names

    def to_json(self) -> dict[str, Any]:
        """Return the content with a digest: a flipped digit would resume from another round."""
        content = {"format": FORMAT, **asdict(self)}
        return {**content, "sha256": _digest(content)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Checkpoint:
        """Raise `ValueError`, `KeyError` or `TypeError` for anything but a checkpoint."""
        content = {name: entry for name, entry in value.items() if name != "sha256"}
        if value["sha256"] != _digest(content) or content.pop("format") != FORMAT:
            raise ValueError("it was changed, or is of another format")
        slots, model = content.pop("slots"), _part(content.pop("model"))
        earlier = tuple((r, s, _part(part)) for r, s, part in content.pop("earlier"))
        counts = [content[name] for name in ("round", "steps", "records_bytes")]
        if not isinstance(content["records_sha256"], str):
            raise ValueError("a digest is not text")
        counts += [count for *pair, _ in earlier for count in pair]
        if not is_duration(content["seconds"]) or not all(map(is_count, counts)):
            raise ValueError("a count is not a number")
        return cls(**content, model=model, slots=slots and _slots(slots), earlier=earlier)


def _part(value: dict[str, Any]) -> Part:
    """Parse a part; refuse names that lead out of the folder."""
    part = Part(**value)
    if not is_part_name(part.file):
        raise ValueError("it names a file that is not part of a checkpoint")
    return part


def _slots(value: dict[str, Any]) -> Slots:
    layout = tuple((name, tuple(shape), kind) for name, shape, kind in value["layout"])
    sizes = [size for _, shape, _ in layout for size in shape]
    if not all(is_count(size) for size in sizes) or value["file"] != SLOTS:
        raise ValueError("its slots are not those of a checkpoint")
    return Slots(value["file"], layout, tuple(map(_part, value["layers"])))


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def stored_in(states: Mapping[int, Tensors], folder: Path) -> StoredStates | None:
    """Return the states if they are stored in the folder's slot file, else None."""
    if isinstance(states, StoredStates) and states.store.file.path == folder / SLOTS:
        return states
    return None


def layer_tensors(layer: Layer) -> dict[str, Tensor]:
    """Return a layer as tensors; checksums are signed, since safetensors readers know int32."""
    checks = layer.checks.view(np.int32)
    columns = {"clients": layer.clients, "slots": layer.slots, "checks": checks}
    return {name: torch.from_numpy(value) for name, value in columns.items()}


def _layer(named: Mapping[str, Tensor]) -> Layer:
    """Return a layer; refuse one without a slot and a checksum per client, in their order."""
    columns = [named[name].cpu().numpy() for name in ("clients", "slots", "checks")]
    clients, slots, checks = columns
    if (
        [column.dtype.name for column in columns] != ["int64", "int64", "int32"]
        or any(column.shape != (len(clients),) for column in columns)
        or (np.diff(clients) <= 0).any()
        or (slots < 0).any()
    ):
        raise DamagedError(f"an index of the slots in {SLOTS} is invalid")
    return Layer(clients, slots, checks.view(np.uint32))


def model_tensors(state: SimulationState) -> dict[str, Tensor]:
    """Return all tensors of a state by name, without client state."""
    named = {"params": state.params, **_named_buffers("buffers", state.buffers)}
    for k, (params, buffers) in enumerate(state.recent):
        named |= {f"recent/{k}/params": params, **_named_buffers(f"recent/{k}", buffers)}
    if state.releases is not None:
        rows = json.dumps(release_rows(state.releases)).encode()
        named["releases"] = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
    named |= {f"server/{name}": value for name, value in state.server.items()}
    return named | {f"shared/{name}": value for name, value in state.broadcast.items()}


def client_tensors(state: SimulationState, clients: Iterable[int]) -> dict[str, Tensor]:
    """Return the state of these clients, by client and name."""
    return {f"{c}/{name}": value for c in clients for name, value in state.clients[c].items()}


def state_from(
    round: int, steps: int, named: Mapping[str, Tensor], clients: Mapping[int, Tensors]
) -> SimulationState:
    """Return the state whose tensors `model_tensors` returned.

    Without releases, as of a run without privacy or of an earlier version, ε counts as infinite.
    """
    iterates = sum(name.startswith("recent/") and name.endswith("/params") for name in named)
    recent = [
        (named[f"recent/{k}/params"], _buffers(named, f"recent/{k}")) for k in range(iterates)
    ]
    rows = named["releases"].cpu().numpy().tobytes() if "releases" in named else b"null"
    releases = parse_json(rows)
    return SimulationState(
        round=round,
        steps=steps,
        params=named["params"],
        buffers=_buffers(named, "buffers"),
        recent=tuple(recent),
        server=section(named, "server/"),
        broadcast=section(named, "shared/"),
        clients=clients,
        releases=None if releases is None else releases_from(releases),
    )


def release_rows(releases: Mapping[Release, int]) -> list[dict[str, Any]]:
    """Return releases with their counts as plain values."""
    return [{**asdict(release), "count": count} for release, count in releases.items()]


def releases_from(rows: Any) -> dict[Release, int]:
    """Return what `release_rows` was given; raise an error for rows that are not of releases."""
    releases = {}
    for row in rows:
        z, sampling = float(row["noise_multiplier"]), row["sampling"]
        counts = [row[name] for name in ("clients", "cohort", "count")]
        if not all(is_count(value, 1) for value in counts):
            raise ValueError("not a number of clients or releases")
        releases[Release(z, sampling, *counts[:2])] = counts[2]
    return releases


def clients_from(named: Mapping[str, Tensor], clients: Iterable[int]) -> dict[int, Tensors]:
    """Return the states of these clients among the named tensors."""
    by_client: dict[int, dict[str, Tensor]] = {}
    for full, value in named.items():
        client, _, name = full.partition("/")
        by_client.setdefault(int(client), {})[name] = value
    return {client: by_client[client] for client in clients}


def _named_buffers(prefix: str, buffers: Buffers) -> dict[str, Tensor]:
    return {f"{prefix}/averaged": buffers.averaged, f"{prefix}/kept": buffers.kept}


def _buffers(named: Mapping[str, Tensor], prefix: str) -> Buffers:
    return Buffers(named[f"{prefix}/averaged"], named[f"{prefix}/kept"])


def section(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): v for name, v in named.items() if name.startswith(prefix)}
