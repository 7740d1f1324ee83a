"""Data larger than memory: prefetching from disk, and copying to a GPU cohort by cohort.

- `prefetch_pages` asks the operating system to read the memory-mapped rows of the next cohort while
  a round computes. It costs next to nothing if they are in memory already.
- `on_device` copies a federation to a GPU if it fits there; else it returns a `StreamedFederation`
  that resides on the host and copies the rows of each cohort to the device.

Neither changes a value.
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

MAX_PREFETCH = 2**30  # bytes per cohort; more would evict the pages in use
RESIDENT_SHARE = 0.5  # of a device's free memory that resident data may take
Numbers = NDArray[np.int64]
Rows = dict[str, Tensor]


def prefetch_pages(federation: Federation, clients: Numbers) -> int:
    """Ask the system to read the pages of some clients; return the number of bytes requested.

    Args:
        federation: the data; fields on a GPU are skipped.
        clients: in increasing order.
    """
    begins, ends = federation.offsets[clients], federation.offsets[clients + 1]
    return sum(
        _prefetch_rows(value, begins, ends)
        for value in federation.fields.values()
        if value.device.type == "cpu" and value.is_contiguous()
    )


def _prefetch_rows(value: Tensor, begins: Numbers, ends: Numbers) -> int:
    """Request rows begins[i] to ends[i], with one call per run of adjacent pages."""
    advise, row = madvise(), value[:1].nbytes
    if advise is None or not row or not len(begins):
        return 0
    first = (value.data_ptr() + begins * row) // mmap.PAGESIZE
    last = -(-(value.data_ptr() + ends * row) // mmap.PAGESIZE)
    starts = np.flatnonzero(np.append(True, first[1:] > last[:-1]))
    stops = last[np.append(starts[1:] - 1, len(last) - 1)]
    requested = 0
    for page, stop in zip(first[starts].tolist(), stops.tolist(), strict=True):
        size = min((stop - page) * mmap.PAGESIZE, MAX_PREFETCH - requested)
        if size <= 0:
            break
        advise(page * mmap.PAGESIZE, size, mmap.MADV_WILLNEED)
        requested += size
    return requested


@cache
def madvise() -> Callable[[int, int, int], int] | None:
    """Return the system call, which releases the GIL; None on platforms without it."""
    call = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_WILLNEED") else None
    if call is None:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise: Callable[[int, int, int], int] = call
    return advise


def on_device(federation: Federation, device: torch.device) -> Federation:
    """Return the federation for training on a device: copied there if it fits, else streamed."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    fields = federation.fields
    size = sum(value.nbytes for value in fields.values() if value.device != device)
    if device.type == "cuda" and size > RESIDENT_SHARE * free_bytes(device):
        return StreamedFederation(fields, federation.offsets, device, finite=True)
    copied = {name: value.to(device) for name, value in fields.items()}
    return replace(federation, fields=copied, finite=True)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including what torch has reserved but not allocated."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + unused


@dataclass(frozen=True, eq=False, repr=False)
class StreamedFederation(Federation):
    """A federation that resides on the host and returns batches on another device.

    Attributes:
        target: the device.
    """

    target: torch.device
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)
    _most_rows: dict[int, int] = field(default_factory=dict, repr=False)
    _prefetched: dict[tuple[int, ...], Future[Rows]] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.target

    def client(self, index: int) -> Batch:
        return self._to_device(super().client(index))

    def batch(self, index: int, rows: NDArray[np.int64]) -> Batch:
        return self._to_device(super().batch(index, rows))

    def first_rows(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each client in what `cohort_rows` returns."""
        sizes = self.sizes[clients]
        return np.cumsum(sizes) - sizes

    def cohort_rows(self, clients: Sequence[int]) -> Batch:
        """Return all examples of some clients, concatenated, on the device.

        Every cohort of the same number of clients gets the same number of rows, so that a captured
        CUDA graph fits the next one; rows after the clients' own are undefined.
        """
        ready = self._prefetched.pop(tuple(clients), None)
        return self._to_device(ready.result() if ready else self._gather(clients))

    def prefetch(self, clients: Sequence[int]) -> None:
        """Gather on the host, in a background thread, what `cohort_rows` will return."""
        self._prefetched.clear()
        self._prefetched[tuple(clients)] = self._thread.submit(self._gather, clients)

    def _gather(self, clients: Sequence[int]) -> Rows:
        """Copy the rows of some clients to host memory, pinned if the target is a GPU."""
        chosen, pinned = np.asarray(clients), self.target.type == "cuda"
        begins, sizes = self.offsets[chosen], self.sizes[chosen]
        within = np.arange(sizes.sum()) - np.repeat(self.first_rows(chosen), sizes)
        rows = torch.from_numpy(np.repeat(begins, sizes) + within)
        gathered = {}
        # a new thread starts with the first GPU as its current device
        with torch.cuda.device(self.target) if pinned else nullcontext():
            for name, value in self.fields.items():
                shape = (self._most(len(chosen)), *value.shape[1:])
                buffer = torch.empty(shape, dtype=value.dtype, pin_memory=pinned)
                torch.index_select(value, 0, rows, out=buffer[: len(rows)])
                gathered[name] = buffer
        return gathered

    def _most(self, clients: int) -> int:
        """Return the largest number of rows that a cohort of this size can have."""
        if clients not in self._most_rows:
            self._most_rows[clients] = int(np.partition(self.sizes, -clients)[-clients:].sum())
        return self._most_rows[clients]

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.target, non_blocking=True) for name, value in batch.items()}
