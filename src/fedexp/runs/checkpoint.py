"""Checkpoints: the last state of a run on the disk, always complete, written incrementally.

Tensors are written to files of new names; then `checkpoint.json`, which lists them with their
digests and a digest of itself, is replaced atomically; then files that nothing refers to are
removed. The checkpoint before it stays on the disk, in case the newest is damaged.

Client state (SCAFFOLD's control variates) can be gigabytes, and a round changes little of it. It is
in a slot file (`engine/slot_file.py`): a checkpoint writes the states that changed to free slots,
unless the run stores client state there itself, syncs the file, and stores which client has which
slot. The writer holds references to the states of both checkpoints, so that their slots are not
reused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from fedexp.errors import UsageError
from fedexp.identity import tensor_bytes
from fedexp.objective import Buffers
from fedexp.runs.files import (
    PRIVATE,
    DamagedError,
    is_count,
    is_duration,
    is_part_name,
    parse_json,
    write_bytes,
    write_json,
)

FORMAT = 2
NEWEST, BEFORE = "checkpoint.json", "checkpoint-before.json"
SLOTS = "checkpoint-clients.slots"
CPU = torch.device("cpu")


def read_checkpoint(
    folder: Path, name: str, device: torch.device
) -> tuple[Checkpoint, SimulationState]:
    """Return a checkpoint and its state; raise `DamagedError` if any byte has changed."""
    try:
        found = Checkpoint.from_json(parse_json((folder / name).read_bytes()))
        named = _read_part(folder, found.model, device)
        clients = _read_clients(folder, found, device)
        return found, state_from(found.round, found.steps, named, clients)
    except DamagedError:
        raise
    except OSError as error:
        raise DamagedError(f"{error.strerror}: {Path(error.filename or name).name}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{name} cannot be read ({type(error).__name__})") from None


def _read_clients(folder: Path, found: Checkpoint, device: torch.device) -> Mapping[int, Tensors]:
    if found.slots is not None:
        layout = Layout(found.slots.layout)
        file = SlotFile(layout, folder / found.slots.file, exists=True)
        return _read_slots(folder, found.slots, StateStore(file, device))
    return {}


def _read_slots(folder: Path, slots: Slots, store: StateStore) -> StoredStates:
    """Return the client state that a checkpoint refers to in the slots of a store."""
    found = [_layer(_read_part(folder, part, CPU)) for part in slots.layers]
    if any(int(each.slots.max(initial=-1)) >= len(store.file) for each in found):
        raise DamagedError(f"{SLOTS} is shorter than it was")
    if not all(_is_sound(each) for each in found):
        raise DamagedError(f"an index of the slots in {SLOTS} is invalid")
    return StoredStates(store, tuple(store.hold(each) for each in found))


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
    """

    def __init__(
        self,
        folder: Path,
        last: Checkpoint | None = None,
        stored: StoredStates | None = None,
        clients: Mapping[int, Tensors] | None = None,
    ) -> None:
        self.folder, self.last = folder, last
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
    ) -> None:
        """Write the state as the newest checkpoint; the one that was newest becomes the one before.

        Args:
            state: the state.
            records_bytes: size of `records.jsonl` up to its round.
            records_sha256: digest of those bytes.
            seconds: training time so far.
            final: whether the run is over, so that client state is not needed any more.
        """
        if self.last is not None and self.last.round == state.round:
            return
        self.saw(state)
        model = self._write_part(f"checkpoint-{state.round}", model_tensors(state))
        stored = None if final else self._stored(state.clients)
        slots = None if stored is None else self._slots(stored, state.round)
        ends = (state.round, state.steps, seconds, records_bytes, records_sha256)
        written = Checkpoint(*ends, model, slots)
        if self.last is not None:
            write_json(self.folder / BEFORE, self.last.to_json(), indent=None, mode=PRIVATE)
        write_json(self.folder / NEWEST, written.to_json(), indent=None, mode=PRIVATE)
        self._remove_unless(written.files | (self.last.files if self.last else set()))
        self.last, self._changed = written, set()
        self._newest, self._before = stored, self._newest

    def settle(self, rounds: int) -> None:
        """Remove all but the newest checkpoint, and client state, as the run is over.

        Called before the result is written, so that a killed process leaves nothing behind: a run
        that resumes from its last round needs no client state. Does nothing where the newest
        checkpoint is of an earlier round, since that one may still be needed.
        """
        if self.last is None or self.last.round != rounds:
            return
        (self.folder / BEFORE).unlink(missing_ok=True)
        if self.last.slots:
            self.last = replace(self.last, slots=None)
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
        known: dict[int, Part] = {}
        if self._newest is not None and self.last is not None and self.last.slots is not None:
            ids = (id(layer) for layer in self._newest.layers)
            known = dict(zip(ids, self.last.slots.layers, strict=True))
        layers = tuple(
            known.get(id(layer))
            or self._write_part(f"checkpoint-{round}-slots-{k}", layer_tensors(layer))
            for k, layer in enumerate(stored.layers)
        )
        return Slots(SLOTS, stored.store.file.layout.tensors, layers)

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
        found = Checkpoint.from_json(parse_json((folder / BEFORE).read_bytes()))
        if found.slots is not None:
            return _read_slots(folder, found.slots, newest.store)
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
    """The content of `checkpoint.json`: a round, where its records end, and its files."""

    round: int
    steps: int
    seconds: float
    records_bytes: int
    records_sha256: str
    model: Part
    slots: Slots | None = None  # client state

    @property
    def files(self) -> set[str]:
        """The names of all files that belong to the checkpoint."""
        named = {self.model.file}
        if self.slots is not None:
            named |= {self.slots.file, *(part.file for part in self.slots.layers)}
        return named

    def to_json(self) -> dict[str, Any]:
        """Return the content with a digest: a flipped digit would resume from another round."""
        content = {"format": FORMAT, **asdict(self)}
        return {**content, "sha256": _digest(content)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Checkpoint:
        """Raise `ValueError`, `KeyError` or `TypeError` for anything but a checkpoint."""
        content = {name: each for name, each in value.items() if name != "sha256"}
        if value["sha256"] != _digest(content) or content.pop("format") != FORMAT:
            raise ValueError("it was changed, or is of another format")
        slots, model = content.pop("slots"), _part(content.pop("model"))
        if not isinstance(content["records_sha256"], str):
            raise ValueError("a digest is not text")
        if not is_duration(content["seconds"]) or not all(
            is_count(content[name]) for name in ("round", "steps", "records_bytes")
        ):
            raise ValueError("a count is not a number")
        return cls(**content, model=model, slots=slots and _slots(slots))


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
    return Slots(value["file"], layout, tuple(_part(each) for each in value["layers"]))


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


def _is_sound(layer: Layer) -> bool:
    """Return whether a layer has a slot and a checksum per client, in the order of clients."""
    columns = (layer.clients, layer.slots, layer.checks)
    whole = all(each.ndim == 1 and len(each) == len(layer) for each in columns)
    return whole and bool((np.diff(layer.clients) > 0).all() and (layer.slots >= 0).all())


def _layer(named: Mapping[str, Tensor]) -> Layer:
    clients, slots, checks = (named[name].cpu().numpy() for name in ("clients", "slots", "checks"))
    if [each.dtype.name for each in (clients, slots, checks)] != ["int64", "int64", "int32"]:
        raise DamagedError(f"an index of the slots in {SLOTS} is invalid")
    return Layer(clients, slots, checks.view(np.uint32))


def model_tensors(state: SimulationState) -> dict[str, Tensor]:
    """Return all tensors of a state by name, without client state."""
    named = {"params": state.params, **_named_buffers("buffers", state.buffers)}
    for k, (params, buffers) in enumerate(state.recent):
        named |= {f"recent/{k}/params": params, **_named_buffers(f"recent/{k}", buffers)}
    named |= {f"server/{name}": value for name, value in state.server.items()}
    return named | {f"shared/{name}": value for name, value in state.broadcast.items()}


def client_tensors(state: SimulationState, clients: Iterable[int]) -> dict[str, Tensor]:
    """Return the state of these clients, by client and name."""
    return {f"{c}/{name}": value for c in clients for name, value in state.clients[c].items()}


def state_from(
    round: int, steps: int, named: Mapping[str, Tensor], clients: Mapping[int, Tensors]
) -> SimulationState:
    """Return the state whose tensors `model_tensors` returned."""
    iterates = sum(name.startswith("recent/") and name.endswith("/params") for name in named)
    recent = [
        (named[f"recent/{k}/params"], _buffers(named, f"recent/{k}")) for k in range(iterates)
    ]
    return SimulationState(
        round=round,
        steps=steps,
        params=named["params"],
        buffers=_buffers(named, "buffers"),
        recent=tuple(recent),
        server=_section(named, "server/"),
        broadcast=_section(named, "shared/"),
        clients=clients,
    )


def clients_from(named: Mapping[str, Tensor], clients: Iterable[int]) -> dict[int, Tensors]:
    """Return the states of these clients among the named tensors."""
    by_client: dict[int, dict[str, Tensor]] = {}
    for full, value in named.items():
        client, _, name = full.partition("/")
        by_client.setdefault(int(client), {})[name] = value
    return {client: by_client[client] for client in clients}


def to_bytes(named: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file; tensors that share memory are copied, as the format requires."""
    from safetensors.torch import save

    own = {name: value.detach().cpu().contiguous().clone() for name, value in named.items()}
    return save(own, {"format": "pt"})


def from_bytes(data: bytes, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on a device; raise `ValueError` for other bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        named = load(data)
    except (SafetensorError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a file of tensors ({type(error).__name__})") from error
    return {name: value.to(device) for name, value in named.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a safetensors file, or in a run folder, by name."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        return from_bytes(file.read_bytes(), CPU)
    except (OSError, ValueError):
        raise UsageError(
            f"there are no weights in {file}; give a finished run or a safetensors file"
        ) from None


def weights_digest(path: Path) -> str:
    """Return a digest of the weights in a file or a run folder, whatever its name."""
    digest = hashlib.sha256()
    for name, value in sorted(read_weights(path).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()[:16]


def _named_buffers(prefix: str, buffers: Buffers) -> dict[str, Tensor]:
    return {f"{prefix}/averaged": buffers.averaged, f"{prefix}/kept": buffers.kept}


def _buffers(named: Mapping[str, Tensor], prefix: str) -> Buffers:
    return Buffers(named[f"{prefix}/averaged"], named[f"{prefix}/kept"])


def _section(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in named.items() if name.startswith(prefix)}
