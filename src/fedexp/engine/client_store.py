"""Storage for per-client state, in memory or in a file.

Client states are an immutable mapping: an update returns a new one, which shares what did not
change. `ClientStates` is in memory. `StoredStates` is in a file of slots, for states larger than
memory, of which a round reads its cohort's: an update is written to a new slot, and a slot is
reused once no living mapping refers to it, so that a checkpoint protects its slots by holding a
reference. `ClientStore` decides between the two.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import Tensors
from fedexp.engine.slot_file import GROWTH, Layout, SlotFile
from fedexp.errors import require

Shapes = frozenset[tuple[str, tuple[int, ...]]]


def shapes_of(state: Tensors) -> Shapes:
    """Return names and shapes of tensors."""
    return frozenset((name, tuple(value.shape)) for name, value in state.items())


class ClientStates(Mapping[int, Tensors]):
    """The states of the clients that have taken part.

    A round changes few of very many, so a copy of all would dominate its cost. These are layers,
    newest first, each more than twice as large as the one before: adding a round costs the number
    of changes times the logarithm of the number of states, on average.

    >>> old = ClientStates.of({1: {}, 2: {}})
    >>> new = old.updated({2: {}, 3: {}})
    >>> sorted(old), sorted(new)
    ([1, 2], [1, 2, 3])
    """

    def __init__(self, layers: tuple[dict[int, Tensors], ...] = ()) -> None:
        self._layers = layers

    @staticmethod
    def of(states: Mapping[int, Tensors]) -> ClientStates:
        """Return the states as they are, where they are of this kind; else in memory."""
        if isinstance(states, ClientStates):
            return states
        return ClientStates((dict(states),) if states else ())

    def updated(self, changed: Mapping[int, Tensors]) -> ClientStates:
        """Return the states with some changed or added; this mapping does not change."""
        if not changed:
            return self
        newest, *older = dict(changed), *self._layers
        while older and 2 * len(newest) >= len(older[0]):
            newest = {**older.pop(0), **newest}
        return ClientStates((newest, *older))

    def stacked(self, clients: Sequence[int], initial: Tensors) -> dict[str, Tensor]:
        """Return the states of some clients, [K, ...] each; `initial` for those that have none.

        >>> states = ClientStates.of({2: {"control": torch.ones(1)}})
        >>> states.stacked([1, 2], {"control": torch.zeros(1)})["control"].tolist()
        [[0.0], [1.0]]
        """
        rows = [self.get(client, initial) for client in clients]
        return {name: torch.stack([row[name] for row in rows]) for name in initial}

    def shapes(self) -> set[Shapes]:
        """Return names and shapes of the states: one entry where all are alike."""
        return {shapes_of(state) for layer in self._layers for state in layer.values()}

    def changed_since(self, before: Mapping[int, Tensors]) -> set[int]:
        """Return the clients whose states differ from those of an earlier mapping.

        Layers that both have are not compared.
        """
        common = before._layers if isinstance(before, ClientStates) else ()
        new = [layer for layer in self._layers if not any(layer is old for old in common)]
        return {c for layer in new for c in layer if before.get(c) is not self[c]}

    def layer_sizes(self) -> list[int]:
        """Return the number of states in each layer, newest first."""
        return [len(layer) for layer in self._layers]

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


@dataclass(frozen=True, eq=False)
class Layer:
    """Clients, in increasing order in a mapping, with the slots and checksums of their states."""

    clients: Numbers
    slots: Numbers
    checks: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.clients)

    def over(self, older: Layer) -> Layer:
        """Return both layers merged; where both have a client, this one's slot."""
        at, there = _among(self.clients, older.clients)
        stay = np.ones(len(older), np.bool_)
        stay[at[there]] = False
        at = np.searchsorted(older.clients[stay], self.clients)
        return Layer(
            np.insert(older.clients[stay], at, self.clients),
            np.insert(older.slots[stay], at, self.slots),
            np.insert(older.checks[stay], at, self.checks),
        )


def _among(some: Numbers, ordered: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the positions of numbers among increasing ones, and whether they are there."""
    at = np.searchsorted(ordered, some)
    return at, ordered[np.minimum(at, len(ordered) - 1)] == some


class StateStore:
    """Allocates the slots of a file, and frees those that no living layer refers to.

    Args:
        file: of the slots.
        device: of the states that are read.
    """

    def __init__(self, file: SlotFile, device: torch.device) -> None:
        self.file, self.device = file, device
        self._users = np.zeros(len(file), np.int32)
        self._free: Numbers | None = None  # unknown until all layers of an old file are marked
        self._released: deque[Numbers] = deque()

    def layer(self, clients: Numbers, states: Sequence[Tensors]) -> Layer:
        """Write the states of clients, in increasing order, to free slots."""
        slots = self._allocated(len(clients))
        try:
            return Layer(clients, slots, self.file.write(slots, states))
        except BaseException:
            self._users[slots] += 1
            self._released.append(slots)
            raise

    def read(self, wanted: Layer) -> dict[str, Tensor]:
        """Return the states of clients that have a slot, [K, ...] each, on the device."""
        layout, pinned = self.file.layout, self.device.type == "cuda"
        size = (len(wanted), layout.bytes)
        block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.file.read(wanted.slots, wanted.checks, block.numpy())
        return layout.split(block.to(self.device, non_blocking=True))

    def hold(self, layer: Layer) -> Layer:
        """Mark a layer's slots as used while it lives, and return it."""
        self._users[layer.slots] += 1
        # the garbage collector may call at any time, so the slots are freed later
        weakref.finalize(layer, self._released.append, layer.slots).atexit = False
        return layer

    @property
    def capacity(self) -> int:
        """The number of slots, free ones included."""
        return len(self._users)

    def used_slots(self) -> int:
        """Return the number of slots that living layers refer to."""
        return self.capacity - len(self._collected())

    def _collected(self) -> Numbers:
        """Return all free slots, with those of layers that died since the last call."""
        while self._released:
            slots = self._released.popleft()
            self._users[slots] -= 1
            if self._free is not None:
                self._free = np.concatenate([self._free, slots[self._users[slots] == 0]])
        if self._free is None:
            self._free = np.flatnonzero(self._users == 0)
        return self._free

    def _allocated(self, count: int) -> Numbers:
        """Return free slots, in increasing order."""
        free = self._collected()
        if count > len(free):
            more = max(count - len(free), self.capacity // GROWTH)
            free = np.concatenate([free, self.capacity + np.arange(more)])
            self._users = np.concatenate([self._users, np.zeros(more, np.int32)])
        slots, self._free = np.sort(free[:count]), free[count:]
        return slots


class StoredStates(ClientStates):
    """The states of the clients that have taken part, in a file.

    Layers as in memory, newest first, but of slot numbers: twenty bytes per client. A state that a
    newer layer replaces stays in its slot until layers are merged, so there are at most twice as
    many slots as clients, besides those that older states or checkpoints refer to.
    """

    def __init__(self, store: StateStore, layers: tuple[Layer, ...] = ()) -> None:
        super().__init__()
        self.store, self.layers = store, layers

    def updated(self, changed: Mapping[int, Tensors]) -> StoredStates:
        if not changed:
            return self
        clients = sorted(changed)
        newest = self.store.layer(np.array(clients), [changed[client] for client in clients])
        older = list(self.layers)
        while older and 2 * len(newest) >= len(older[0]):
            newest = newest.over(older.pop(0))
        return StoredStates(self.store, (self.store.hold(newest), *older))

    def stacked(self, clients: Sequence[int], initial: Tensors) -> dict[str, Tensor]:
        places = self.find(np.asarray(clients))
        stored = np.flatnonzero(places.slots >= 0)
        loaded = self.store.read(
            Layer(places.clients[stored], places.slots[stored], places.checks[stored])
        )
        if len(stored) == len(clients):
            return loaded
        index = torch.from_numpy(stored).to(self.store.device)
        rows = {n: v.expand(len(clients), *v.shape).clone() for n, v in initial.items()}
        return {name: value.index_copy_(0, index, loaded[name]) for name, value in rows.items()}

    def find(self, clients: Numbers) -> Layer:
        """Return the slots of clients, in their order; -1 where a client has none."""
        slots, checks = np.full(len(clients), -1), np.zeros(len(clients), np.uint32)
        for layer in self.layers:  # the newest has the current state of a client
            at, there = _among(clients, layer.clients)
            there &= slots < 0
            slots[there], checks[there] = layer.slots[at[there]], layer.checks[at[there]]
        return Layer(clients, slots, checks)

    def prefetch(self, clients: Numbers) -> None:
        """Ask the system to read the states of these clients ahead."""
        slots = self.find(clients).slots
        self.store.file.prefetch(slots[slots >= 0])

    def in_memory(self) -> ClientStates:
        """Return the states in memory, on the device of the store."""
        states: dict[int, Tensors] = {}
        for clients in blocks(self._clients().tolist(), self.store.file.layout.bytes):
            rows = self.store.read(self.find(np.array(clients)))
            for k, client in enumerate(clients):
                # copies: a view would hold the memory of the whole block
                states[client] = {name: value[k].clone() for name, value in rows.items()}
        return ClientStates.of(states)

    def layer_sizes(self) -> list[int]:
        return [len(layer) for layer in self.layers]

    def shapes(self) -> set[Shapes]:
        layout = self.store.file.layout.tensors
        return {frozenset((name, shape) for name, shape, _ in layout)} if self.layers else set()

    def changed_since(self, before: Mapping[int, Tensors]) -> set[int]:
        clients = self._clients()
        if not isinstance(before, StoredStates) or before.store is not self.store:
            return set(clients.tolist())
        return set(clients[self.find(clients).slots != before.find(clients).slots].tolist())

    def __getitem__(self, client: int) -> Tensors:
        place = self.find(np.array([client]))
        if place.slots[0] < 0:
            raise KeyError(client)
        return {name: value[0] for name, value in self.store.read(place).items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients().tolist())

    def __len__(self) -> int:
        return len(self._clients())

    def _clients(self) -> Numbers:
        numbers = [layer.clients for layer in self.layers]
        return np.unique(np.concatenate([np.empty(0, np.int64), *numbers]))


Location = Literal["auto", "memory", "disk"]
SHARE = 4  # client states may take a quarter of the memory
UNKNOWN = 2**62  # bytes of memory where the system does not report it
COPIED_BYTES = 2**26  # of client state at a time
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ClientStore:
    """Where client state is stored; does not affect results.

    Args:
        where: "memory", "disk", or "auto" for memory where a quarter of it would hold the states
            of all clients that can take part.
        file: the file on disk; None for a temporary one.
        clients: how many clients can take part, at most, in all calls of `simulate` that share the
            file: they all decide alike; None for those of the call.
    """

    where: Location = "auto"
    file: Path | None = None
    clients: int | None = None

    def __post_init__(self) -> None:
        choices = get_args(Location)
        require(self.where in choices, f"client_store is auto, memory or disk, not {self.where!r}")

    def store(
        self, states: Mapping[int, Tensors], initial: Tensors, clients: int, processes: int = 1
    ) -> Mapping[int, Tensors]:
        """Return the states, copied to memory or to the file where they are not there.

        Args:
            states: client states so far.
            initial: the initial state of a client.
            clients: how many clients may have a state, at most.
            processes: how many processes of this machine store all states, each on its own GPU if
                any.
        """
        if not initial:
            return states
        device = next(iter(initial.values())).device
        size = sum(value.nbytes for value in initial.values())
        available = memory_bytes(device) // (processes if device.type == "cpu" else 1)
        fits = SHARE * size * (self.clients or clients) <= available
        if self.where == "memory" or (self.where == "auto" and fits):
            return ClientStates.of(
                states.in_memory() if isinstance(states, StoredStates) else states
            )
        if isinstance(states, StoredStates) and self.file in (None, states.store.file.path):
            return states
        empty = StoredStates(StateStore(SlotFile(Layout.of(initial), self.file), device))
        return copy_states(states, list(states), empty)


def copy_states(
    states: Mapping[int, Tensors], clients: Sequence[int], stored: StoredStates
) -> StoredStates:
    """Return `stored` with the states of some clients of another mapping, a block at a time."""
    for some in blocks(clients, stored.store.file.layout.bytes):
        stored = stored.updated({client: states[client] for client in some})
    return stored


def blocks(clients: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield clients whose states, of `size` bytes each, are copied at a time."""
    together = max(1, COPIED_BYTES // max(size, 1))
    for at in range(0, len(clients), together):
        yield clients[at : at + together]


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, or the part of the machine's that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return UNKNOWN
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.exists() else "max"
        available = min(available, int(text)) if text.isdecimal() else available
    return available
