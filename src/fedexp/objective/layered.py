"""`LayeredStack`: gradients of many clients whose parameters lie layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from fedexp.kernels.layers import Layers
from fedexp.kernels.rooms import gradients_into
from fedexp.objective.flat import shaped
from fedexp.objective.stack import Stack


class LayeredStack:
    """A stack with memory of its own for one local training of K clients.

    Layers read the parameters where they are, or a copy in the type they compute in, and write
    gradients where the step wants them: nothing is gathered in between.

    Args:
        stack: the model of K clients.
        rows: the parameters that the clients begin with, [K, d], maybe with zeros behind them.
    """

    def __init__(self, stack: Stack, rows: Tensor) -> None:
        self.stack = stack
        self.layers = Layers(len(rows), tuple(each.numel() for each in stack.like))
        self.params = self.layers.spread(rows)
        kind = stack.compute_type
        self.copy = None if kind is None else self.params.to(kind)
        self.grads = torch.zeros_like(self.params if self.copy is None else self.copy)

    def gradients(self, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        """The gradients layer by layer, overwritten by the next call; `counted` [K, B]."""
        weights = [w.detach().requires_grad_() for w in self._weights()]
        rooms = self._views(self.grads)
        # a compiler relies on gradients without gaps, as they are where nobody offers a room
        dense = [s == n for s, n in zip(self.layers.strides, self.layers.sizes, strict=True)]
        with gradients_into(list(compress(weights, dense)), list(compress(rooms, dense))):
            grads = self.stack.slopes(weights, x, y, counted)
        _settle(grads, rooms)
        return self.grads

    def outputs(self, x: Tensor) -> Tensor:
        """The outputs of the K models on K times as many examples, [K * B]."""
        return self.stack.forward(self._weights(), x)

    def rows(self) -> Tensor:
        """The parameters as a vector for each client."""
        return self.layers.gather(self.params)

    def _weights(self) -> list[Tensor]:
        whole = self._views(self.params)
        if self.copy is None:
            return whole
        pairs = zip(whole, self._views(self.copy), self.stack.exact, strict=True)
        return [full if exact else narrow for full, narrow, exact in pairs]

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(self.layers.pieces(flat), self.stack.like, strict=True)
        return [shaped(piece, like.shape) for piece, like in pieces]


def _settle(grads: Sequence[Tensor | None], rooms: Sequence[Tensor]) -> None:
    """Copy the gradients that are not where they were wanted."""
    elsewhere = [(g, room) for g, room in zip(grads, rooms, strict=True) if not _same(g, room)]
    for grad, room in elsewhere:
        if grad is None:
            room.zero_()
    moved = [(g, room) for g, room in elsewhere if g is not None]
    if moved:
        torch._foreach_copy_([room for _, room in moved], [g for g, _ in moved])


def _same(grad: Tensor | None, room: Tensor) -> bool:
    return grad is not None and grad.data_ptr() == room.data_ptr()
