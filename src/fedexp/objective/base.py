"""A model's tensors as one vector, and back.

The weights of a convolution, [O, C, KH, KW], lie in the vector with their channels last, as
[O, KH, KW, C]: that is the order in which fast convolutions read them, so no step has to turn them.

What a client minimises: a loss of a flat parameter vector and a batch, and its gradient.

All parameters of a model are one vector: norms are over the whole model by construction, and a
step of any rule is one operation. Buffers travel beside it and are never extrapolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedexp.data.federation import Batch


def flatten(tensors: Sequence[Tensor], lead: int = 0) -> Tensor:
    """One vector of all of them, or one for each index of the `lead` first dimensions.

    >>> flatten([torch.zeros(2, 3), torch.ones(1)]).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    """
    if not tensors:
        return torch.empty(0)
    turned = [t.movedim(lead + 1, -1) if t.ndim == lead + 4 else t for t in tensors]
    return torch.cat([t.flatten(lead) if t.ndim > lead else t[None] for t in turned], dim=lead)


def pieces(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of vectors [..., d] in the shapes of `like`; what lies behind those is left out."""
    sizes = [t.numel() for t in like]
    parts = vector[..., : sum(sizes)].split(sizes, dim=-1) if like else ()
    return [shaped(part, t.shape) for part, t in zip(parts, like, strict=True)]


def shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """Views of stretches [..., n] in the shape of the weight that lies there."""
    if len(shape) != 4:
        return part.unflatten(-1, shape) if len(shape) else part.squeeze(-1)
    outputs, channels, *window = shape
    return part.unflatten(-1, (outputs, *window, channels)).movedim(-1, -3)


def unflatten_into(targets: Sequence[Tensor], vector: Tensor) -> None:
    """Let the targets be views of consecutive pieces of `vector`, without a copy."""
    for target, piece in zip(targets, pieces(vector, targets), strict=True):
        target.data = piece


class Buffers(NamedTuple):
    """A model's buffers: floating-point ones (averaged over clients) and the others (kept)."""

    averaged: Tensor
    kept: Tensor

    @classmethod
    def none(cls) -> Buffers:
        return cls(torch.empty(0), torch.empty(0, dtype=torch.int64))


class Objective(Protocol):
    """The contract between a problem and the plain loop.

    To run on a GPU it also has `on(device, precision)`, which returns a copy that lives there.
    """

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        """The first model, a pure function of the seed."""
        ...

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        """The gradient of the local loss at `params`, and the buffers after the forward pass."""
        ...

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        """Per-example values, `loss` and for classifiers `accuracy`, in evaluation mode."""
        ...


@runtime_checkable
class BatchedObjective(Objective, Protocol):
    """What the batched engine asks for: gradients of many clients at once."""

    def batching_pays(self, device: torch.device) -> bool:
        """Return whether many clients at once are faster than one by one on such a device."""
        ...

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Return the gradients of K clients: every argument has a leading dimension K.

        `valid` [K, B] is 1 for an example and 0 for one that only fills up a shorter batch.
        """
        ...


def buffer_changes(after: Tensor, start: Tensor) -> Tensor:
    """Return what local training adds to averaged buffers.

    Changes, not values, enter the sums: a buffer that forward leaves alone (a causal mask with
    -inf, a positional encoding) stays what it is to the bit and cannot make an update unusable.
    Where the start was not finite (a running maximum), it is the new value, or 0 for none.
    """
    new = torch.where(after.isfinite(), after, 0.0)
    return torch.where(start.isfinite(), after - start, new)


def changed_buffers(start: Tensor, change: Tensor) -> Tensor:
    """Return averaged buffers after a mean of `buffer_changes`.

    >>> start = torch.tensor([1.0, -torch.inf, -torch.inf])
    >>> changed_buffers(start, buffer_changes(torch.tensor([3.0, 2.0, -torch.inf]), start)).tolist()
    [3.0, 2.0, -inf]
    """
    new = torch.where(change == 0, start, change)
    return torch.where(start.isfinite(), start + change, new)
