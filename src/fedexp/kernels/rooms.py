"""Rooms: where the gradients of weights are wanted, so that they need not be copied there.

An offer, not a promise: a kernel that cannot write there returns memory of its own, and whoever
made the offer looks where the gradient is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

# Not a context variable: the backward pass of a GPU runs in a thread of its own.
_rooms: dict[int, Tensor] = {}


@contextmanager
def gradients_into(weights: Sequence[Tensor], rooms: Sequence[Tensor]) -> Iterator[None]:
    """Offer a room for the gradient of each of these weights, of its shape and in its order.

    Rooms have no gaps: a compiled backward pass relies on what it was told of its results.
    """
    offered = {w.data_ptr(): room for w, room in zip(weights, rooms, strict=True)}
    _rooms.update(offered)
    try:
        yield
    finally:
        for address in offered:
            del _rooms[address]


def room_for(weight: Tensor) -> Tensor | None:
    """Where the gradient of a weight is wanted, if anybody said so."""
    return _rooms.get(weight.data_ptr()) if _rooms else None
