"""Rows that will be wanted soon: the system is asked to read them, so that nobody waits for a disk.

For data that are memory-mapped and larger than memory. Asking costs next to nothing where the rows
are in memory already, and changes no value.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.federation import Federation

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
