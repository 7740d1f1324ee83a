"""Group normalisation with what follows it, so that an engine can do all of it at once."""

from __future__ import annotations

from torch import Tensor, nn


class GroupNormReLU(nn.GroupNorm):
    """relu(GroupNorm(x) + residual).

    >>> import torch
    >>> GroupNormReLU(1, 2)(torch.tensor([[[[1.0]], [[3.0]]]])).flatten().tolist()
    [0.0, 0.99...]
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        normalised = super().forward(input)
        return (normalised if residual is None else normalised + residual).relu()
