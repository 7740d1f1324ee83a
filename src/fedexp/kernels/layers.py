"""Rooms: where the gradients of weights are wanted, so that they need not be copied there.

An offer, not a promise: a kernel that cannot write there returns memory of its own, and whoever
made the offer looks where the gradient is.

`Layers`: the parameters of many clients, with the weights of a layer side by side.

A vector for each client suits rules and sums; a layer of all clients in one stretch of memory suits
the products of a GPU, and their gradients can be written where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch
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


ALIGNED = 16  # numbers: where a GPU likes a row to begin


@dataclass(frozen=True)
class Layers:
    """K clients; `sizes` are the parameters of one client in each layer.

    >>> layers = Layers(2, (1, 2))
    >>> flat = layers.spread(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    >>> [piece.tolist() for piece in layers.pieces(flat)]
    [[[1.0], [4.0]], [[2.0, 3.0], [5.0, 6.0]]]
    >>> layers.gather(flat).tolist()
    [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    """

    clients: int
    sizes: tuple[int, ...]

    @cached_property
    def strides(self) -> list[int]:
        """From one client of a layer to the next."""
        return [-(-size // ALIGNED) * ALIGNED for size in self.sizes]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each layer begins, and the end."""
        return [0, *accumulate(self.clients * stride for stride in self.strides)]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views [K, size] of every layer."""
        layers = flat.split([self.clients * stride for stride in self.strides])
        rows = (layer.view(self.clients, -1) for layer in layers)
        return [row[:, :size] for row, size in zip(rows, self.sizes, strict=True)]

    def spread(self, rows: Tensor) -> Tensor:
        """From a vector for each client, [K, d], or one for all, [d]."""
        flat = rows.new_zeros(self.offsets[-1])
        parts = rows[..., : sum(self.sizes)].split(self.sizes, dim=-1)
        for piece, part in zip(self.pieces(flat), parts, strict=True):
            piece.copy_(part)
        return flat

    def gather(self, flat: Tensor) -> Tensor:
        """Back to a vector for each client, [K, d]."""
        return torch.cat(self.pieces(flat), dim=1)

    def blocks(self, device: torch.device, length: int) -> Tensor:
        """A row for each block of at most `length` numbers, [K * n, 4], client after client.

        Where it begins, how long it is, where it begins in a client's vector, and whose it is.
        """
        return _blocks(self.clients, self.sizes, length).to(device)


@cache
def _blocks(clients: int, sizes: Sequence[int], length: int) -> Tensor:
    layers = Layers(clients, tuple(sizes))
    begins = [0, *accumulate(sizes)]
    parts = []
    for offset, stride, size, begin in zip(
        layers.offsets, layers.strides, sizes, begins, strict=False
    ):
        within = torch.arange(0, size, length)
        parts.append(
            torch.stack([offset + within, (size - within).clamp(max=length), begin + within,
                         torch.full_like(within, stride)])
        )  # fmt: skip
    at, lengths, begin, stride = torch.cat(parts, dim=1)
    client = torch.arange(clients)[:, None]
    columns = torch.broadcast_tensors(at + client * stride, lengths, begin, client)
    return torch.stack(columns, dim=-1).reshape(-1, 4).contiguous()
