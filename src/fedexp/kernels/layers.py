"""Parameters of K clients stored layer by layer: their layout, gradient buffers and SGD step.

Client and server rules work on one vector per client. The matrix products of a GPU are fastest when
the weights of a layer are contiguous over all clients, and kernels can then write a gradient
directly to where the SGD step reads it: to its gradient buffer.

The step, `sgd_step`, computes in place what `local.local_step` computes on one vector per client.
On a GPU that is three Triton kernels (`step_triton`): two for the norms of the gradients, and one
that corrects, clips, decays and updates, and writes the copy of the parameters that the layers
compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton

ALIGNMENT = 16  # numbers; kernels read 16 at a time


@dataclass(frozen=True)
class Layers:
    """The memory layout of K clients' parameters, layer by layer.

    Attributes:
        clients: the number of clients K.
        sizes: the number of parameters of one client in each layer.

    >>> layers = Layers(2, (1, 2))
    >>> flat = layers.pack(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    >>> [view.tolist() for view in layers.views(flat)]
    [[[1.0], [4.0]], [[2.0, 3.0], [5.0, 6.0]]]
    >>> layers.unpack(flat).tolist()
    [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    """

    clients: int
    sizes: tuple[int, ...]

    @cached_property
    def strides(self) -> list[int]:
        """The distance from one client of a layer to the next."""
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]

    @cached_property
    def offsets(self) -> list[int]:
        """The start of each layer, and the end of the last."""
        return [0, *accumulate(self.clients * stride for stride in self.strides)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view [K, size] of each layer."""
        layers = flat.split([self.clients * stride for stride in self.strides])
        rows = (layer.view(self.clients, -1) for layer in layers)
        return [row[:, :size] for row, size in zip(rows, self.sizes, strict=True)]

    def pack(self, rows: Tensor) -> Tensor:
        """Return one vector per client, [K, d], or one for all, [d], layer by layer."""
        flat = rows.new_empty(self.offsets[-1])
        parts = rows[..., : sum(self.sizes)].split(self.sizes, dim=-1)
        ends = [self.clients * stride for stride in self.strides]
        for layer, part in zip(flat.split(ends), parts, strict=True):
            row, size = layer.view(self.clients, -1), part.shape[-1]
            row[:, :size].copy_(part)
            if row.shape[1] > size:  # zeros between clients
                row[:, size:].zero_()
        return flat

    def unpack(self, flat: Tensor) -> Tensor:
        """Return one vector per client, [K, d]."""
        return torch.cat(self.views(flat), dim=1)

    def blocks(self, length: int) -> Tensor:
        """Return a table of the blocks of at most `length` numbers, [K * n, 4], client by client.

        A row has the start of the block, its length, its start in the client's vector, and the
        client.
        """
        begins = [0, *accumulate(self.sizes)]
        parts = []
        for offset, stride, size, begin in zip(
            self.offsets, self.strides, self.sizes, begins, strict=False
        ):
            within = torch.arange(0, size, length)
            parts.append(
                torch.stack([offset + within, (size - within).clamp(max=length), begin + within,
                             torch.full_like(within, stride)])
            )  # fmt: skip
        at, lengths, begin, stride = torch.cat(parts, dim=1)
        client = torch.arange(self.clients)[:, None]
        columns = torch.broadcast_tensors(at + client * stride, lengths, begin, client)
        return torch.stack(columns, dim=-1).reshape(-1, 4).contiguous()


# Not context variables: on a GPU the backward pass runs in its own thread.
_buffers: dict[int, Tensor] = {}
_written: set[int] = set()


@contextmanager
def gradient_buffers(weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[set[int]]:
    """Offer a buffer for the gradient of each weight, of its shape and memory order.

    Each is offered once, to the first gradient. A kernel that cannot write to a buffer returns new
    memory, so the caller checks where each gradient is stored. Buffers have no gaps. Yields the
    addresses of the weights whose gradient is in the buffer but was not returned (`sum_parts`).
    """
    offered = {w.data_ptr(): buffer for w, buffer in zip(weights, buffers, strict=True)}
    _buffers.update(offered)
    try:
        yield _written
    finally:
        for address in offered:
            _buffers.pop(address, None)
        _written.clear()


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """Return the buffer offered for the gradient of a weight, if any, the first time."""
    return _buffers.pop(weight.data_ptr(), None) if _buffers else None


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return dy [K, N, O] times x [K, N, F]: [K, O, F], in the buffer of the gradient if any."""
    buffer = gradient_buffer(weight)
    if buffer is None or buffer.dtype != x.dtype or buffer.shape != weight.shape:
        return torch.bmm(dy.mT, x)
    return torch.bmm(dy.mT, x, out=buffer)


def sum_parts(parts: Tensor, *weights: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of small weights from parts of them: the sums over the parts.

    A sum is written to the buffer of its weight if there is one, in the type of the buffer, and
    None is returned.

    Args:
        parts: [n, K, parts, size]; those of the i-th weight are parts[i].
        weights: n weights of K clients with `size` numbers each.
    """
    buffers = [gradient_buffer(weight) for weight in weights]
    results = [
        w.new_empty(w.shape) if b is None else b for w, b in zip(weights, buffers, strict=True)
    ]
    if parts.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        step_triton.sum_parts(parts, results)
    else:
        for total, result in zip(parts.sum(dim=2), results, strict=True):
            result.copy_(total.view(result.shape))
    _written.update(w.data_ptr() for w, b in zip(weights, buffers, strict=True) if b is not None)
    return tuple(r if b is None else None for r, b in zip(results, buffers, strict=True))


@dataclass(frozen=True, eq=False)
class Correction:
    """The linear correction of a client rule: prox (w - start) + offset is added to gradients.

    Attributes:
        prox: factor of the proximal term; 0 for none.
        start: the parameters before local training, [d].
        offset: a constant, layer by layer; None for none.
    """

    prox: float
    start: Tensor
    offset: Tensor | None = None


def clipped_lrs(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    lr: Tensor,
    bound: float,
) -> Tensor:
    """Return a learning rate times each client's clipping factor, [K]; `lr` is a scalar."""
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        return step_triton.clipped_lrs(layers, params, grads, correction, lr, bound)
    corrected = layers.unpack(_corrected(layers, params, grads, correction))
    norms = torch.linalg.vector_norm(corrected, dim=1, dtype=torch.float64)
    return (lr * (bound / norms).clamp(max=1.0)).to(params.dtype)


def sgd_step(
    layers: Layers,
    params: Tensor,
    grads: Tensor,
    correction: Correction,
    lrs: Tensor,
    decay: Tensor,
    active: Tensor,
    copy: Tensor | None = None,
    deltas: Tensor | None = None,
) -> None:
    """Update w to decay * w - lr * (corrected gradient) in place, for the active clients.

    Args:
        lrs: the learning rate of every client times its clipping factor, [K].
        decay: 1 minus learning rate times weight decay, a scalar.
        active: whether a client takes this step, [K].
        copy: the parameters in another type, updated as well.
        deltas: where to write the start of all clients minus their parameters, a vector per client
            [K, d], in the last step; parameters and copy are undefined after it.
    """
    if params.is_cuda and has_triton():
        from fedexp.kernels import step_triton

        step_triton.sgd_step(layers, params, grads, correction, lrs, decay, active, copy, deltas)
        return
    corrected = _corrected(layers, params, grads, correction)
    decay, rates = decay.to(params.dtype), lrs[:, None].to(params.dtype)
    for rows, grad in zip(layers.views(params), layers.views(corrected), strict=True):
        rows.copy_(torch.where(active[:, None], rows * decay - grad * rates, rows))
    if deltas is not None:
        torch.sub(correction.start[: deltas.shape[1]], layers.unpack(params), out=deltas)
    if copy is not None:
        copy.copy_(params)


def _corrected(layers: Layers, params: Tensor, grads: Tensor, correction: Correction) -> Tensor:
    """Return the gradients with the client rule's correction, layer by layer."""
    grads = grads.to(params.dtype)
    if correction.prox:
        grads = grads.add(params - layers.pack(correction.start), alpha=correction.prox)
    return grads if correction.offset is None else grads + correction.offset
