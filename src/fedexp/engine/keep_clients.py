"""Where what clients keep lies: in memory while all of it would fit, else in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from fedexp.client import Tensors
from fedexp.engine.client_states import ClientStates
from fedexp.engine.slot_file import Layout, SlotFile
from fedexp.engine.state_store import StateStore, StoredStates
from fedexp.errors import require

Where = Literal["auto", "memory", "disk"]
SHARE = 4  # what clients keep may take a quarter of the memory
UNKNOWN = 2**62  # bytes, where the system does not say how many there are
MOVED_AT_A_TIME = 1024  # states
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class KeepClients:
    """How to keep what clients keep between rounds; it changes no number.

    Args:
        where: "memory", "disk", or "auto" for memory where a quarter of it would hold the states
            of all clients that can take part.
        file: what to write on a disk, by itself; None for a temporary file.
    """

    where: Where = "auto"
    file: Path | None = None

    def __post_init__(self) -> None:
        known = get_args(Where)
        require(self.where in known, f"keep_clients is auto, memory or disk, not {self.where!r}")

    def placed(
        self, states: Mapping[int, Tensors], fresh: Tensors, clients: int, beside: int = 1
    ) -> Mapping[int, Tensors]:
        """The states where they are to be.

        Args:
            states: what clients keep so far.
            fresh: what one begins with.
            clients: how many may keep something, at most.
            beside: how many processes of this machine keep all of it, each on its own GPU if any.
        """
        if not fresh or (self.where == "auto" and isinstance(states, StoredStates)):
            return states
        device = next(iter(fresh.values())).device
        size = sum(value.nbytes for value in fresh.values())
        room = memory_bytes(device) // (beside if device.type == "cpu" else 1)
        if self.where == "memory" or (self.where == "auto" and SHARE * size * clients <= room):
            return ClientStates.of(dict(states) if isinstance(states, StoredStates) else states)
        return self._stored(states, fresh, device)

    def _stored(
        self, states: Mapping[int, Tensors], fresh: Tensors, device: torch.device
    ) -> StoredStates:
        """On the disk; those that lie in another file are moved some at a time."""
        if isinstance(states, StoredStates) and self.file in (None, states.store.file.path):
            return states
        empty = StoredStates(StateStore(SlotFile(Layout.of(fresh), self.file), device))
        return moved(states, empty)


def moved(states: Mapping[int, Tensors], stored: StoredStates) -> StoredStates:
    """States that lie elsewhere, in the store of `stored`."""
    clients = list(states)
    for at in range(0, len(clients), MOVED_AT_A_TIME):
        some = clients[at : at + MOVED_AT_A_TIME]
        stored = stored.updated({client: states[client] for client in some})
    return stored


def memory_bytes(device: torch.device) -> int:
    """The memory of a device, or of what this process may have of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return UNKNOWN
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.exists() else "max"
        found = min(found, int(text)) if text.isdecimal() else found
    return found
