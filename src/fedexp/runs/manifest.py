"""`checkpoint.json`: what a checkpoint consists of, with a digest of every part and of itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from fedexp.runs.foreign import is_count, is_duration, is_part_name

FORMAT = 1
SLOTS = "checkpoint-clients.slots"


@dataclass(frozen=True)
class Part:
    """A file of tensors; `clients` are those whose newest state is here, of `held` in all."""

    file: str
    sha256: str
    clients: tuple[int, ...] = ()
    held: int = 0


@dataclass(frozen=True)
class Slots:
    """Clients' states that lie in a file of slots, which is never copied.

    Attributes:
        file: of the slots.
        layout: name, shape and type of what a slot holds.
        layers: files that say which client's state is in which slot, newest first, with its digest.
    """

    file: str
    layout: tuple[tuple[str, tuple[int, ...], str], ...]
    layers: tuple[Part, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What `checkpoint.json` says: a round, where its records end, and its files."""

    round: int
    steps: int
    seconds: float
    records_bytes: int
    model: Part
    clients: tuple[Part, ...] = ()
    slots: Slots | None = None

    @property
    def files(self) -> set[str]:
        named = {self.model.file, *(part.file for part in self.clients)}
        if self.slots is not None:
            named |= {self.slots.file, *(part.file for part in self.slots.layers)}
        return named

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
        slots = content.pop("slots", None)
        model = _part(content.pop("model"))
        if not is_duration(content["seconds"]) or not all(
            is_count(content[name]) for name in ("round", "steps", "records_bytes")
        ):
            raise ValueError("it counts with something else than numbers")
        return cls(**content, model=model, clients=parts, slots=slots and _slots(slots))


def _part(value: dict[str, Any]) -> Part:
    """A part of this very folder: nobody's list of files leads to others."""
    part = Part(**{**value, "clients": tuple(value["clients"])})
    numbers = (*part.clients, part.held)
    if not is_part_name(part.file) or not all(is_count(number) for number in numbers):
        raise ValueError("it names a file that is no part of a checkpoint")
    return part


def _slots(value: dict[str, Any]) -> Slots:
    layout = tuple((name, tuple(shape), kind) for name, shape, kind in value["layout"])
    sizes = [size for _, shape, _ in layout for size in shape]
    if not all(is_count(size) for size in sizes) or value["file"] != SLOTS:
        raise ValueError("its slots are none of a checkpoint")
    return Slots(value["file"], layout, tuple(_part(each) for each in value["layers"]))


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
