"""Checkpoints: a run's last state on the disk, always whole, never all of it again.

The tensors go to files of new names; then `checkpoint.json`, which lists them with their digests,
is put in place at once; then files that nothing names any more are removed. The checkpoint before
stays beside it, for a disk that damages the newest.

Clients' states (SCAFFOLD's control variates) can be gigabytes, and a round changes few of them, so
each checkpoint adds a file of those that changed, and refers to older files for the others. Where
more than half of what is stored has become stale, all are written anew: that bounds the room at
twice what is alive, for at most twice the writing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.engine.client_states import ClientStates
from fedexp.runs.atomic import write_bytes, write_json
from fedexp.runs.records import DamagedError
from fedexp.runs.tensors import (
    client_tensors,
    clients_from,
    from_bytes,
    model_tensors,
    state_from,
    to_bytes,
)

FORMAT = 1
NEWEST, BEFORE = "checkpoint.json", "checkpoint-before.json"
PART_BYTES = 2**28  # of clients' states in one file, since a file passes through memory


@dataclass(frozen=True)
class Part:
    """A file of tensors; `clients` are those whose newest state is here, of `held` in all."""

    file: str
    sha256: str
    clients: tuple[int, ...] = ()
    held: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What `checkpoint.json` says: a round, where its records end, and its files."""

    round: int
    steps: int
    seconds: float
    records_bytes: int
    model: Part
    clients: tuple[Part, ...] = ()

    @property
    def files(self) -> set[str]:
        return {self.model.file, *(part.file for part in self.clients)}

    def to_json(self) -> dict[str, Any]:
        """With a digest of its own: one digit that flips would go on from another round."""
        content = {"format": FORMAT, **asdict(self)}
        return {**content, "sha256": _digest(content)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Checkpoint:
        """Raises `ValueError`, `KeyError` or `TypeError` for anything but a checkpoint."""
        content = {name: each for name, each in value.items() if name != "sha256"}
        if value["sha256"] != _digest(content) or content.pop("format") != FORMAT:
            raise ValueError("it is not as it was written, or of another format")
        parts = tuple(_part(each) for each in content.pop("clients"))
        return cls(**{**content, "model": _part(content["model"])}, clients=parts)


def _part(value: dict[str, Any]) -> Part:
    return Part(**{**value, "clients": tuple(value["clients"])})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_checkpoint(
    folder: Path, name: str, device: torch.device
) -> tuple[Checkpoint, SimulationState]:
    """A checkpoint and its state; raises `DamagedError` unless every byte is as it was written."""
    try:
        found = Checkpoint.from_json(json.loads((folder / name).read_bytes()))
        named = _read_part(folder, found.model, device)
        clients: dict[int, Tensors] = {}
        for part in found.clients:
            clients |= clients_from(_read_part(folder, part, device), part.clients)
        return found, state_from(found.round, found.steps, named, clients)
    except DamagedError:
        raise
    except OSError as error:
        raise DamagedError(f"{error.strerror}: {Path(error.filename or name).name}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{name} cannot be read ({type(error).__name__})") from None


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

    def saw(self, state: SimulationState) -> None:
        """Note which clients a round has given new states: a new one is another object."""
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
        clients = () if final else tuple(self._client_parts(state))
        written = Checkpoint(state.round, state.steps, seconds, records_bytes, model, clients)
        if self.last is not None:
            write_json(self.folder / BEFORE, self.last.to_json(), indent=None)
        write_json(self.folder / NEWEST, written.to_json(), indent=None)
        self._remove_unless(written.files | (self.last.files if self.last else set()))
        self.last, self._changed = written, set()

    def settle(self, final: bool) -> None:
        """The run is over: keep the newest alone, and clients' states only if it ended early."""
        (self.folder / BEFORE).unlink(missing_ok=True)
        if final and self.last is not None and self.last.clients:
            self.last = replace(self.last, clients=())
            write_json(self.folder / NEWEST, self.last.to_json(), indent=None)
        self._remove_unless(self.last.files if self.last else set())

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
        write_bytes(self.folder / name, data)
        return Part(name, hashlib.sha256(data).hexdigest())

    def _remove_unless(self, wanted: set[str]) -> None:
        for path in self.folder.glob("checkpoint-*.safetensors"):
            if path.name not in wanted:
                path.unlink()


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
