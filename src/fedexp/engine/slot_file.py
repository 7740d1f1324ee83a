"""A file of equal slots, each with the named tensors that one client keeps.

Slots are written by ordinary writes, so that a full disk is an error and not a signal, and read
through a memory map whose pages are given back at once: the page cache has them, the process not.
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
from fedexp.errors import UsageError, require

ALIGNMENT = 8  # of every tensor in a slot: no type needs more
BLOCK_BYTES = 2**22  # that are put together, checked and written at a time
GROWTH = 8  # the file grows by an eighth, or by a block where that is more


@dataclass(frozen=True)
class Layout:
    """What lies where in a slot.

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
    def places(self) -> tuple[dict[str, tuple[int, int]], int]:
        """The first and the last byte of every tensor, and the bytes of a slot."""
        found, at = {}, 0
        for name, shape, kind in self.tensors:
            size = math.prod(shape) * _type(kind).itemsize
            found[name] = (at, at + size)
            at += size + -size % ALIGNMENT
        return found, max(at, ALIGNMENT)

    @property
    def bytes(self) -> int:
        return self.places[1]

    def joined(self, rows: Sequence[Tensors]) -> Tensor:
        """States as bytes [K, bytes] on the host."""
        found = Layout.of(rows[0])
        require(
            set(found.tensors) == set(self.tensors),
            f"a client rule that keeps {found.tensors} but begins with {self.tensors} cannot have "
            "its states in a file; begin with tensors of that shape and type",
        )
        block = torch.zeros(len(rows), self.bytes, dtype=torch.uint8)
        for name, (begin, end) in self.places[0].items():
            value = torch.stack([row[name] for row in rows]).reshape(len(rows), -1)
            block[:, begin:end].view(value.dtype).copy_(value)
        return block

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Bytes [K, bytes] as tensors [K, ...]."""
        found = {}
        for name, shape, kind in self.tensors:
            begin, end = self.places[0][name]
            value = block[:, begin:end].contiguous().view(_type(kind))
            found[name] = value.view(len(block), *shape)
        return found


def _type(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


class SlotFile:
    """The file; it is made when something is written for the first time.

    Args:
        layout: of a slot.
        path: where it lies; None for a temporary one, which goes with the process.
        exists: go on with a file that is there; else it begins empty.
    """

    def __init__(self, layout: Layout, path: Path | None = None, exists: bool = False) -> None:
        self.layout, self.path = layout, path
        self._file: int | None = None  # its descriptor
        self._map: mmap.mmap | None = None
        self._slots: NDArray[np.uint8] = np.empty((0, layout.bytes), np.uint8)
        if exists:
            assert path is not None
            self._file = self._closing(os.open(path, os.O_RDWR))
            self._mapped(os.fstat(self._file).st_size // layout.bytes)

    def __len__(self) -> int:
        """How many slots there is room for."""
        return len(self._slots)

    def write(self, slots: NDArray[np.int64], rows: Sequence[Tensors]) -> NDArray[np.uint32]:
        """Put states into slots, which are in increasing order; return their checksums."""
        together, checks = max(1, BLOCK_BYTES // self.layout.bytes), []
        try:
            self._reserve(int(slots[-1]) + 1)
            for at in range(0, len(rows), together):
                block = self.layout.joined(rows[at : at + together]).numpy()
                checks.append(_checksums(block))
                for first, last in _runs(slots[at : at + together]):
                    self._put(int(slots[at + first]), block[first:last])
        except OSError as error:
            raise UsageError(
                f"cannot write clients' states to {self._name}: {error.strerror or error}; make "
                "room, or keep them in memory (--client-states memory)"
            ) from error
        return np.concatenate(checks)

    def read(
        self, slots: NDArray[np.int64], checks: NDArray[np.uint32], into: NDArray[np.uint8]
    ) -> None:
        """Copy slots to rows of `into` [K, bytes]; refuse what is not as it was written."""
        self.expect(slots)  # all at once, so that none waits for another
        np.take(self._slots, slots, axis=0, out=into, mode="clip")  # other modes copy twice
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        if not np.array_equal(_checksums(into), checks):
            raise UsageError(
                f"a client's state in {self._name} is not as it was written; begin the run again "
                "with --restart"
            )

    def expect(self, slots: NDArray[np.int64]) -> None:
        """Have the system read slots that will be wanted soon."""
        if self._file is None or not hasattr(os, "posix_fadvise"):
            return
        size = self.layout.bytes
        for slot in slots.tolist():
            os.posix_fadvise(self._file, slot * size, size, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
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
        """Make the file and its map long enough; what was never written takes no room."""
        if self._file is None:
            self._file = self._closing(self._made())
        if slots > len(self):
            step = max(len(self) // GROWTH, BLOCK_BYTES // self.layout.bytes)
            os.ftruncate(self._file, (slots + step) * self.layout.bytes)
            self._mapped(slots + step)

    def _made(self) -> int:
        if self.path is not None:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        file, name = tempfile.mkstemp(prefix="fedexp-clients-")
        os.unlink(name)  # so that it goes when nobody has it open, however the process ends
        return file

    def _closing(self, file: int) -> int:
        weakref.finalize(self, os.close, file)
        return file

    def _mapped(self, slots: int) -> None:
        if not slots:
            return
        assert self._file is not None
        size = slots * self.layout.bytes
        self._map = mmap.mmap(self._file, size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)  # neighbours of a slot are nobody's business
        self._slots = np.frombuffer(self._map, np.uint8).reshape(slots, -1)


def _checksums(block: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.array([zlib.crc32(row) for row in block], np.uint32)


def _runs(slots: NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    """Where neighbours begin and end among slots in increasing order."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    return zip([0, *cuts.tolist()], [*cuts.tolist(), len(slots)], strict=True)
