"""Checkpoints: a run's last state on the disk, always whole, never all of it again.

The tensors go to files of new names; then `checkpoint.json`, which lists them with their digests,
is put in place at once; then files that nothing names any more are removed. The checkpoint before
stays beside it, for a disk that damages the newest.

Clients' states (SCAFFOLD's control variates) can be gigabytes, and a round changes few of them, so
each checkpoint adds a file of those that changed, and refers to older files for the others. Where
more than half of what is stored has become stale, all are written anew: that bounds the room at
twice what is alive, for at most twice the writing. Those that lie in a file of slots stay where
they are (see `slots`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.engine.client_states import ClientStates
from fedexp.engine.state_store import StateStore, StoredStates
from fedexp.runs.atomic import PRIVATE, write_bytes, write_json
from fedexp.runs.foreign import parse_json
from fedexp.runs.manifest import Checkpoint, Part, Slots
from fedexp.runs.records import DamagedError
from fedexp.runs.slots import SLOTS, layer_tensors, opened, restored, stored_in
from fedexp.runs.tensors import (
    client_tensors,
    clients_from,
    from_bytes,
    model_tensors,
    state_from,
    to_bytes,
)

NEWEST, BEFORE = "checkpoint.json", "checkpoint-before.json"
CPU = torch.device("cpu")
PART_BYTES = 2**28  # of clients' states in one file, since a file passes through memory


def read_checkpoint(
    folder: Path, name: str, device: torch.device
) -> tuple[Checkpoint, SimulationState]:
    """A checkpoint and its state; raises `DamagedError` unless every byte is as it was written."""
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
        return _read_slots(folder, found.slots, opened(folder, found.slots, device))
    clients: dict[int, Tensors] = {}
    for part in found.clients:
        clients |= clients_from(_read_part(folder, part, device), part.clients)
    return clients


def _read_slots(folder: Path, slots: Slots, store: StateStore) -> StoredStates:
    """What a checkpoint says about the slots of a store."""
    return restored(store, [_read_part(folder, part, CPU) for part in slots.layers])


def _read_part(folder: Path, part: Part, device: torch.device) -> dict[str, torch.Tensor]:
    data = (folder / part.file).read_bytes()
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise DamagedError(f"{part.file} is not as it was written")
    return from_bytes(data, device)


class Checkpoints:
    """Writes the checkpoints of one run; remembers which clients changed since the last one."""

    def __init__(
        self, folder: Path, last: Checkpoint | None, state: SimulationState | None
    ) -> None:
        self.folder, self.last = folder, last
        self._clients: Mapping[int, Tensors] = {} if state is None else state.clients
        self._changed: set[int] = set()
        # what the newest and the one before refer to, so that no slot of theirs is used again
        self._newest, self._before = self._clients, _before(folder, self._clients)

    def saw(self, state: SimulationState) -> None:
        """Note which clients a round has given new states: a new one is another object."""
        if stored_in(state.clients, self.folder) is not None:
            return
        if state.clients is not self._clients:
            self._changed |= ClientStates.of(state.clients).changed_since(self._clients)
            self._clients = state.clients

    def write(
        self, state: SimulationState, records_bytes: int, seconds: float, final: bool = False
    ) -> None:
        """Make the state the newest checkpoint, and the newest the one before.

        After the final one nobody trains, so the clients' states are not part of it.
        """
        if self.last is not None and self.last.round == state.round:
            return
        model = self._write_part(f"checkpoint-{state.round}", model_tensors(state))
        slots = None if final else self._slots(state)
        clients = () if final or slots else tuple(self._client_parts(state))
        ends = (state.round, state.steps, seconds, records_bytes)
        written = Checkpoint(*ends, model, clients, slots)
        if self.last is not None:
            write_json(self.folder / BEFORE, self.last.to_json(), indent=None, mode=PRIVATE)
        write_json(self.folder / NEWEST, written.to_json(), indent=None, mode=PRIVATE)
        self._remove_unless(written.files | (self.last.files if self.last else set()))
        self.last, self._changed = written, set()
        self._newest, self._before = state.clients, self._newest

    def settle(self, final: bool) -> None:
        """The run is over: keep the newest alone, without clients' states.

        One that diverged keeps all, so that it can be reopened.
        """
        if not final:
            return
        (self.folder / BEFORE).unlink(missing_ok=True)
        if self.last is not None and (self.last.clients or self.last.slots):
            self.last = replace(self.last, clients=(), slots=None)
            write_json(self.folder / NEWEST, self.last.to_json(), indent=None, mode=PRIVATE)
        self._remove_unless(self.last.files if self.last else set())

    def _slots(self, state: SimulationState) -> Slots | None:
        """Where the clients' states lie, if in a file of slots; what is known is not written again.

        The states themselves have to be on the disk before anything refers to them.
        """
        states = stored_in(state.clients, self.folder)
        if states is None or not states.layers:
            return None
        states.store.file.sync()
        known: dict[int, Part] = {}
        before = stored_in(self._newest, self.folder)
        if before is not None and self.last is not None and self.last.slots is not None:
            ids = (id(layer) for layer in before.layers)
            known = dict(zip(ids, self.last.slots.layers, strict=True))
        stem = f"checkpoint-{state.round}-slots"
        layers = tuple(
            known.get(id(layer)) or self._write_part(f"{stem}-{k}", layer_tensors(layer))
            for k, layer in enumerate(states.layers)
        )
        return Slots(SLOTS, states.store.file.layout.tensors, layers)

    def _client_parts(self, state: SimulationState) -> Iterator[Part]:
        older = self.last.clients if self.last else ()
        rewrite = sum(part.held for part in older) + len(self._changed) > 2 * len(state.clients)
        changed = sorted(state.clients if rewrite else self._changed)
        for part in older:
            alive = tuple(c for c in part.clients if not rewrite and c not in self._changed)
            if alive:
                yield replace(part, clients=alive)
        for k, group in enumerate(_groups(state, changed)):
            part = self._write_part(
                f"checkpoint-{state.round}-clients-{k}", client_tensors(state, group)
            )
            yield replace(part, clients=tuple(group), held=len(group))

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


def _before(folder: Path, newest: Mapping[int, Tensors]) -> Mapping[int, Tensors]:
    """What the checkpoint before refers to in the store of the newest, if it does."""
    states = stored_in(newest, folder)
    if states is None:
        return {}
    with suppress(OSError, DamagedError, ValueError, KeyError, TypeError):
        found = Checkpoint.from_json(parse_json((folder / BEFORE).read_bytes()))
        if found.slots is not None:
            return _read_slots(folder, found.slots, states.store)
    return {}


def _groups(state: SimulationState, clients: Iterable[int]) -> Iterator[list[int]]:
    """Clients whose states fit a file together."""
    group: list[int] = []
    room = PART_BYTES
    for client in clients:
        size = sum(value.nbytes for value in state.clients[client].values())
        if group and size > room:
            yield group
            group, room = [], PART_BYTES
        group.append(client)
        room -= size
    if group:
        yield group
