"""A model's tensors as one vector, and back.

The weights of a convolution, [O, C, KH, KW], lie in the vector with their channels last, as
[O, KH, KW, C]: that is the order in which fast convolutions read them, so no step has to turn them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
