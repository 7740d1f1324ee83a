"""A file of equal slots, each with the named tensors of one client's state.

Slots are written by ordinary writes, so that a full disk raises an error and not a signal, and read
through a memory map whose pages are released at once: they stay in the page cache, not in the
memory of the process.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import Tensors
from fedexp.errors import DamagedError, UsageError, require

ALIGNMENT = 8  # of every tensor in a slot, or the size of its type where that is more
BLOCK_BYTES = 2**22  # written at a time
GROWTH = 8  # the file grows by an eighth, or by a block where that is more
PRIVATE = 0o600  # mode of the file: client state is for the owner only


@dataclass(frozen=True)
class Layout:
    """The offsets of tensors in a slot.

    Attributes:
        tensors: name, shape and type of each.

    >>> Layout.of({"control": torch.zeros(3)}).tensors
    (('control', (3,), 'float32'),)
    """

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, state: Tensors) -> Layout:
        kinds = ((n, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for n, v in state.items())
        return cls(tuple(kinds))

    @cached_property
    def offsets(self) -> tuple[dict[str, tuple[int, int]], int]:
        """The first byte and the end of every tensor, and the bytes of a slot."""
        offsets, at, widest = {}, 0, ALIGNMENT
        for name, shape, kind in self.tensors:
            unit = _type(kind).itemsize
            widest = max(widest, unit)
            at += -at % max(unit, ALIGNMENT)
            offsets[name] = (at, at + math.prod(shape) * unit)
            at = offsets[name][1]
        return offsets, max(at + -at % widest, widest)

    @property
    def bytes(self) -> int:
        return self.offsets[1]

    def join(self, rows: Sequence[Tensors]) -> Tensor:
        """Return states as bytes, [K, bytes] on the host."""
        distinct = {tuple((n, v.shape, v.dtype) for n, v in row.items()): row for row in rows}
        for layout in map(Layout.of, distinct.values()):
            require(
                set(layout.tensors) == set(self.tensors),
                f"client states of different shapes or types, {self.tensors} and {layout.tensors}, "
                "cannot be stored in a file; let end_round return tensors like those of "
                "init_client_state",
            )
        block = torch.zeros(len(rows), self.bytes, dtype=torch.uint8)
        for name, (begin, end) in self.offsets[0].items():
            value = torch.stack([row[name] for row in rows]).detach()
            into = block[:, begin:end].view(value.dtype)
            into.copy_(value.reshape(into.shape))
        return block

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return bytes [K, bytes] as tensors, [K, ...] each: the inverse of `join`."""
        tensors = {}
        for name, shape, kind in self.tensors:
            begin, end = self.offsets[0][name]
            value = block[:, begin:end].contiguous().view(_type(kind))
            tensors[name] = value.view(len(block), *shape)
        return tensors


def _type(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class DamagedSlotError(DamagedError):
    """A slot is not as it was written."""


class SlotFile:
    """The file; it is created by the first write.

    Args:
        layout: of a slot.
        path: of the file, which only its owner can read; None for a temporary one, which is deleted
            with the process.
        exists: continue an existing file; else it starts empty.
    """

    def __init__(self, layout: Layout, path: Path | None = None, exists: bool = False) -> None:
        self.layout, self.path = layout, path
        self._file: int | None = None  # its descriptor
        self._map: mmap.mmap | None = None
        self._slots: NDArray[np.uint8] = np.empty((0, layout.bytes), np.uint8)
        if exists:
            self._file = self._opened(os.O_RDWR)
            self._remap(os.fstat(self._file).st_size // layout.bytes)

    def __len__(self) -> int:
        """Return the capacity of the file in slots."""
        return len(self._slots)

    def write(self, slots: NDArray[np.int64], rows: Sequence[Tensors]) -> NDArray[np.uint32]:
        """Write states to slots, which are in increasing order; return their checksums."""
        together, checks = max(1, BLOCK_BYTES // self.layout.bytes), []
        try:
            self._reserve(int(slots[-1]) + 1)
            for at in range(0, len(rows), together):
                block = self.layout.join(rows[at : at + together]).numpy()
                checks.append(_checksums(block))
                for first, last in _runs(slots[at : at + together]):
                    self._put(int(slots[at + first]), block[first:last])
        except OSError as error:
            memory = "" if self.path else ", or store them in memory (--client-states memory)"
            raise UsageError(
                f"cannot write client states to {self._name}: {error.strerror or error}; free "
                f"space{memory}"
            ) from error
        return np.concatenate(checks)

    def read(
        self, slots: NDArray[np.int64], checks: NDArray[np.uint32], into: NDArray[np.uint8]
    ) -> None:
        """Copy slots to rows of `into` [K, bytes]; raises where a checksum does not match."""
        self.prefetch(slots)  # all at once, so that the reads overlap
        np.take(self._slots, slots, axis=0, out=into, mode="clip")  # other modes copy twice
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        if not np.array_equal(_checksums(into), checks):
            raise DamagedSlotError(f"a client state in {self._name} is damaged (checksum mismatch)")

    def prefetch(self, slots: NDArray[np.int64]) -> None:
        """Ask the system to read slots ahead."""
        if self._file is None or not hasattr(os, "posix_fadvise"):
            return
        size = self.layout.bytes
        for slot in slots.tolist():
            os.posix_fadvise(self._file, slot * size, size, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Wait until all writes are on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    @property
    def _name(self) -> str:
        return str(self.path or f"a temporary file in {tempfile.gettempdir()}")

    def _put(self, slot: int, block: NDArray[np.uint8]) -> None:
        assert self._file is not None
        data, at = memoryview(block.data).cast("B"), slot * self.layout.bytes
        while data:
            done = os.pwrite(self._file, data, at)
            data, at = data[done:], at + done

    def _reserve(self, slots: int) -> None:
        """Make the file and its map long enough; slots that were never written take no space."""
        if self._file is None:
            self._file = self._opened(os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if slots > len(self):
            step = max(len(self) // GROWTH, BLOCK_BYTES // self.layout.bytes)
            os.ftruncate(self._file, (slots + step) * self.layout.bytes)
            self._remap(slots + step)

    def _opened(self, flags: int) -> int:
        """Return the descriptor of the file, which is closed with this object."""
        if self.path is None:
            file, name = tempfile.mkstemp(prefix="fedexp-clients-")
            os.unlink(name)  # so that it is deleted however the process ends
        else:
            file = os.open(self.path, flags, PRIVATE)
            os.fchmod(file, PRIVATE)  # it may have existed
        weakref.finalize(self, os.close, file)
        return file

    def _remap(self, slots: int) -> None:
        if not slots:
            return
        assert self._file is not None
        size = slots * self.layout.bytes
        self._map = mmap.mmap(self._file, size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)  # neighbours of a slot are not needed
        self._slots = np.frombuffer(self._map, np.uint8).reshape(slots, -1)


def _checksums(block: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.array([zlib.crc32(row) for row in block], np.uint32)


def _runs(slots: NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    """Yield begin and end of runs of adjacent slots, among slots in increasing order."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    return zip([0, *cuts.tolist()], [*cuts.tolist(), len(slots)], strict=True)
