"""Rows that will be wanted soon: the system is asked to read them, so that nobody waits for a disk.

For data that are memory-mapped and larger than memory. Asking costs next to nothing where the rows
are in memory already, and changes no value.

`Streamed`: a federation that stays on the host; its rows travel to a device round by round.

For data larger than a device's memory. The host's copy may be memory-mapped, and larger than its
memory too.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.federation import Batch, Federation

MOST_BYTES = 2**30  # asked for at a time: more would push out what is being worked on
Numbers = NDArray[np.int64]


def ask_for(federation: Federation, clients: Numbers) -> int:
    """Have the system read the examples of clients, which are in increasing order.

    Returns how many bytes were asked for.
    """
    begins, ends = federation.offsets[clients], federation.offsets[clients + 1]
    return sum(
        _ask_for_rows(value, begins, ends)
        for value in federation.fields.values()
        if value.device.type == "cpu" and value.is_contiguous()
    )


def _ask_for_rows(value: Tensor, begins: Numbers, ends: Numbers) -> int:
    """One call for each run of neighbouring pages."""
    advise, row = _advise(), value[:1].nbytes
    if advise is None or not row or not len(begins):
        return 0
    first = (value.data_ptr() + begins * row) // mmap.PAGESIZE
    last = -(-(value.data_ptr() + ends * row) // mmap.PAGESIZE)
    starts = np.flatnonzero(np.append(True, first[1:] > last[:-1]))
    stops = last[np.append(starts[1:] - 1, len(last) - 1)]
    asked = 0
    for page, stop in zip(first[starts].tolist(), stops.tolist(), strict=True):
        size = min((stop - page) * mmap.PAGESIZE, MOST_BYTES - asked)
        if size <= 0:
            break
        advise(page * mmap.PAGESIZE, size, mmap.MADV_WILLNEED)
        asked += size
    return asked


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's call, which lets other threads run; None where there is none."""
    call = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_WILLNEED") else None
    if call is None:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise: Callable[[int, int, int], int] = call
    return advise


SHARE = 2  # resident data may take half of what a device has free
Rows = dict[str, Tensor]


def on_device(federation: Federation, device: torch.device) -> Federation:
    """The federation for training on a device: there as a whole where it fits."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    fields = federation.fields
    size = sum(value.nbytes for value in fields.values() if value.device != device)
    if device.type == "cuda" and SHARE * size > _free(device):
        return Streamed(fields, federation.offsets, device, finite=True)
    moved = {name: value.to(device) for name, value in fields.items()}
    return replace(federation, fields=moved, finite=True)


def _free(device: torch.device) -> int:
    """Bytes that a device has free, with those that torch keeps for later."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + kept


@dataclass(frozen=True, eq=False)
class Streamed(Federation):
    """A federation whose examples are handed out on a device they do not lie on.

    Attributes:
        target: the device.
    """

    target: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)
    _rooms: dict[int, int] = field(default_factory=dict, repr=False)
    _ahead: dict[tuple[int, ...], Future[Rows]] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.target

    def client(self, index: int) -> Batch:
        return self._moved(super().client(index))

    def batch(self, index: int, rows: NDArray[np.int64]) -> Batch:
        return self._moved(super().batch(index, rows))

    def places(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the clients' rows begin in what `travelling` gives."""
        sizes = self.sizes[clients]
        return np.cumsum(sizes) - sizes

    def travelling(self, clients: Sequence[int]) -> Batch:
        """All examples of some clients, one after another, on the device.

        As many rows for every cohort of that size, so that a captured program fits the next one;
        what is behind the clients' own means nothing.
        """
        ready = self._ahead.pop(tuple(clients), None)
        return self._moved(ready.result() if ready else self._gathered(clients))

    def prepare(self, clients: Sequence[int]) -> None:
        """Gather on the host what `travelling` will be asked for, in the background."""
        self._ahead.clear()
        self._ahead[tuple(clients)] = self._thread.submit(self._gathered, clients)

    def _gathered(self, clients: Sequence[int]) -> Rows:
        chosen, pinned = np.asarray(clients), self.target.type == "cuda"
        begins, sizes = self.offsets[chosen], self.sizes[chosen]
        within = np.arange(sizes.sum()) - np.repeat(self.places(chosen), sizes)
        rows = torch.from_numpy(np.repeat(begins, sizes) + within)
        most, found = self._most(len(chosen)), {}
        # a thread begins with the first device, whichever its rows are for
        with torch.cuda.device(self.target) if pinned else nullcontext():
            for name, value in self.fields.items():
                room = torch.empty(most, *value.shape[1:], dtype=value.dtype, pin_memory=pinned)
                torch.index_select(value, 0, rows, out=room[: len(rows)])
                found[name] = room
        return found

    def _most(self, clients: int) -> int:
        """The rows that so many clients have at most."""
        if clients not in self._rooms:
            self._rooms[clients] = int(np.partition(self.sizes, -clients)[-clients:].sum())
        return self._rooms[clients]

    def _moved(self, batch: Batch) -> Batch:
        return {name: value.to(self.target, non_blocking=True) for name, value in batch.items()}
