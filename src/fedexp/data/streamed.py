"""`Streamed`: a federation that stays on the host; its rows travel to a device round by round.

For data larger than a device's memory. The host's copy may be memory-mapped, and larger than its
memory too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.federation import Batch, Federation

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
