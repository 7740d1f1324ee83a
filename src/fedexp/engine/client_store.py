"""What clients keep between rounds, in a mapping whose successor shares what did not change.

What clients keep, in a file: states larger than memory, of which a round reads its cohort's.

A state is never changed in place: an update goes to a new slot, and the mapping after it refers to
that one. A slot is used again once no mapping that is alive refers to it, so whoever holds on to a
state of the simulation, such as a checkpoint, keeps its slots by that alone.

Where what clients keep lies: in memory while all of it would fit, else in a file.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import Tensors
from fedexp.engine.slot_file import GROWTH, Layout, SlotFile
from fedexp.errors import require

Shapes = frozenset[tuple[str, tuple[int, ...]]]


def shapes_of(state: Tensors) -> Shapes:
    """Names and shapes of tensors."""
    return frozenset((name, tuple(value.shape)) for name, value in state.items())


class ClientStates(Mapping[int, Tensors]):
    """The states of the clients that have taken part.

    A round changes few of very many, so a copy of all would be what costs most in it. These are
    layers, newest first, each more than twice as large as the one before: adding a round costs
    what changed, times the logarithm of what is there, on average.

    >>> old = ClientStates.of({1: {}, 2: {}})
    >>> new = old.updated({2: {}, 3: {}})
    >>> sorted(old), sorted(new)
    ([1, 2], [1, 2, 3])
    """

    def __init__(self, layers: tuple[dict[int, Tensors], ...] = ()) -> None:
        self._layers = layers

    @staticmethod
    def of(states: Mapping[int, Tensors]) -> ClientStates:
        """The states as they are, where they are of this kind; else in memory."""
        if isinstance(states, ClientStates):
            return states
        return ClientStates((dict(states),) if states else ())

    def updated(self, changed: Mapping[int, Tensors]) -> ClientStates:
        """These with some changed or added; this one stays as it is."""
        if not changed:
            return self
        newest, *older = dict(changed), *self._layers
        while older and 2 * len(newest) >= len(older[0]):
            newest = {**older.pop(0), **newest}
        return ClientStates((newest, *older))

    def stacked(self, clients: Sequence[int], fresh: Tensors) -> dict[str, Tensor]:
        """What some clients keep, side by side [K, ...]; `fresh` for those that keep nothing yet.

        >>> states = ClientStates.of({2: {"control": torch.ones(1)}})
        >>> states.stacked([1, 2], {"control": torch.zeros(1)})["control"].tolist()
        [[0.0], [1.0]]
        """
        rows = [self.get(client, fresh) for client in clients]
        return {name: torch.stack([row[name] for row in rows]) for name in fresh}

    def shapes(self) -> set[Shapes]:
        """Names and shapes of what clients keep: one entry where all keep the same."""
        return {shapes_of(state) for layer in self._layers for state in layer.values()}

    def changed_since(self, before: Mapping[int, Tensors]) -> set[int]:
        """The clients whose states are others than in an earlier one.

        Layers that both have are not looked at.
        """
        known = before._layers if isinstance(before, ClientStates) else ()
        fresh = [layer for layer in self._layers if not any(layer is old for old in known)]
        return {c for layer in fresh for c in layer if before.get(c) is not self[c]}

    def __getitem__(self, client: int) -> Tensors:
        for layer in self._layers:
            if client in layer:
                return layer[client]
        raise KeyError(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(set().union(*self._layers)))

    def __len__(self) -> int:
        return len(set().union(*self._layers))


Numbers = NDArray[np.int64]


class Found(NamedTuple):
    """Where clients' states lie: slots, -1 for none, and what their checksums must be."""

    slots: Numbers
    checks: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Layer:
    """Clients in increasing order, each with its slot and the checksum of what is there."""

    clients: Numbers
    slots: Numbers
    checks: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.clients)

    def over(self, older: Layer) -> Layer:
        """Both in one; where both have a client, this one's slot."""
        at, there = _among(self.clients, older.clients)
        stay = np.ones(len(older), np.bool_)
        stay[at[there]] = False
        at = np.searchsorted(older.clients[stay], self.clients)
        return Layer(
            np.insert(older.clients[stay], at, self.clients),
            np.insert(older.slots[stay], at, self.slots),
            np.insert(older.checks[stay], at, self.checks),
        )

    def find(self, clients: Numbers, found: Found) -> None:
        """Fill in, for clients in increasing order, what is here and not found yet."""
        at, there = _among(clients, self.clients)
        there &= found.slots < 0
        found.slots[there] = self.slots[at[there]]
        found.checks[there] = self.checks[at[there]]


def _among(some: Numbers, others: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Where numbers would stand among others that are in increasing order, and whether they do."""
    at = np.searchsorted(others, some)
    return at, others[np.minimum(at, len(others) - 1)] == some


class StateStore:
    """Hands out the slots of a file, and takes back those that no living layer refers to.

    Args:
        file: of the slots.
        device: where states are wanted.
    """

    def __init__(self, file: SlotFile, device: torch.device) -> None:
        self.file, self.device = file, device
        self._users = np.zeros(len(file), np.int32)
        self._free: Numbers | None = None  # not known before all layers of an old file are held
        self._left: deque[Numbers] = deque()

    def layer(self, clients: Numbers, states: Sequence[Tensors]) -> Layer:
        """Write the states of clients that are in increasing order."""
        slots = self._taken(len(clients))
        try:
            return Layer(clients, slots, self.file.write(slots, states))
        except BaseException:
            self._users[slots] += 1
            self._left.append(slots)
            raise

    def read(self, found: Found) -> dict[str, Tensor]:
        """The states in slots, side by side, on the device."""
        layout, pinned = self.file.layout, self.device.type == "cuda"
        size = (len(found.slots), layout.bytes)
        block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.file.read(found.slots, found.checks, block.numpy())
        return layout.split(block.to(self.device, non_blocking=True))

    def hold(self, layer: Layer) -> Layer:
        """Count a layer's slots as used while it lives."""
        self._users[layer.slots] += 1
        # a collector may call at any time, so it only leaves a note
        weakref.finalize(layer, self._left.append, layer.slots).atexit = False
        return layer

    def _taken(self, count: int) -> Numbers:
        """Free slots, in increasing order."""
        while self._left:
            slots = self._left.popleft()
            self._users[slots] -= 1
            if self._free is not None:
                self._free = np.concatenate([self._free, slots[self._users[slots] == 0]])
        if self._free is None:
            self._free = np.flatnonzero(self._users == 0)
        if count > len(self._free):
            end = len(self._users)
            more = max(count - len(self._free), end // GROWTH)
            self._users = np.concatenate([self._users, np.zeros(more, np.int32)])
            self._free = np.concatenate([self._free, end + np.arange(more)])
        slots, self._free = np.sort(self._free[:count]), self._free[count:]
        return slots


class StoredStates(ClientStates):
    """The states of the clients that have taken part, in a store.

    Layers as in memory, newest first, but of numbers alone: twenty bytes a client. What newer
    layers hide stays in its slot until layers are merged, so slots are at most twice as many as
    clients, and those that older states or checkpoints refer to.
    """

    def __init__(self, store: StateStore, layers: tuple[Layer, ...] = ()) -> None:
        super().__init__()
        self.store, self.layers = store, layers

    def updated(self, changed: Mapping[int, Tensors]) -> StoredStates:
        """These with some changed or added; this one stays as it is."""
        if not changed:
            return self
        clients = sorted(changed)
        newest = self.store.layer(np.array(clients), [changed[client] for client in clients])
        older = list(self.layers)
        while older and 2 * len(newest) >= len(older[0]):
            newest = newest.over(older.pop(0))
        return StoredStates(self.store, (self.store.hold(newest), *older))

    def stacked(self, clients: Sequence[int], fresh: Tensors) -> dict[str, Tensor]:
        """What some clients keep, side by side [K, ...], on the device of the store."""
        found = self.find(np.asarray(clients))
        known = np.flatnonzero(found.slots >= 0)
        loaded = self.store.read(Found(found.slots[known], found.checks[known]))
        if len(known) == len(clients):
            return loaded
        places = torch.from_numpy(known).to(self.store.device)
        rows = {n: v.expand(len(clients), *v.shape).clone() for n, v in fresh.items()}
        return {name: value.index_copy_(0, places, loaded[name]) for name, value in rows.items()}

    def find(self, clients: Numbers) -> Found:
        """Where the clients' states lie."""
        order = np.argsort(clients, kind="stable")
        found = Found(np.full(len(clients), -1), np.zeros(len(clients), np.uint32))
        for layer in self.layers:
            layer.find(clients[order], found)
        back = np.argsort(order, kind="stable")
        return Found(found.slots[back], found.checks[back])

    def expect(self, clients: Numbers) -> None:
        """Have the system read what these clients keep."""
        slots = self.find(clients).slots
        self.store.file.expect(slots[slots >= 0])

    def shapes(self) -> set[Shapes]:
        """Names and shapes of what a slot holds."""
        layout = self.store.file.layout.tensors
        return {frozenset((name, shape) for name, shape, _ in layout)} if self.layers else set()

    def changed_since(self, before: Mapping[int, Tensors]) -> set[int]:
        """The clients whose states are others than in an earlier one."""
        clients = self._clients()
        if not isinstance(before, StoredStates) or before.store is not self.store:
            return set(clients.tolist())
        return set(clients[self.find(clients).slots != before.find(clients).slots].tolist())

    def __getitem__(self, client: int) -> Tensors:
        found = self.find(np.array([client]))
        if found.slots[0] < 0:
            raise KeyError(client)
        return {name: value[0] for name, value in self.store.read(found).items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients().tolist())

    def __len__(self) -> int:
        return len(self._clients())

    def _clients(self) -> Numbers:
        every = [layer.clients for layer in self.layers]
        return np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)


Where = Literal["auto", "memory", "disk"]
SHARE = 4  # what clients keep may take a quarter of the memory
UNKNOWN = 2**62  # bytes, where the system does not say how many there are
MOVED_AT_A_TIME = 1024  # states
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ClientStore:
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
        require(self.where in known, f"client_store is auto, memory or disk, not {self.where!r}")

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
