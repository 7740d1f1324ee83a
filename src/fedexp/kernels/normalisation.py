"""`group_norm`: GroupNorm in which every client has its own scale and shift, fused with ReLU.

On a GPU forward and backward are one Triton kernel each (`normalisation_triton`);
`plain_group_norm` is their twin in plain PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.launch import differentiable, has_triton


def group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return images [K * B, C, H, W] normalised by groups, times weight [K, C] plus bias [K, C].

    A residual is then added, and ReLU applied if `relu`.

    >>> group_norm(torch.tensor([[[[1.0]], [[3.0]]]]), torch.ones(1, 2), torch.zeros(1, 2), 1)
    tensor([[[[-1.0000]],
    <BLANKLINE>
             [[ 1.0000]]]])
    """
    if x.is_cuda and x.ndim == 4 and x.dtype != torch.float64 and has_triton():
        from fedexp.kernels.normalisation_triton import GroupNorm

        return differentiable(GroupNorm, x, weight, bias, residual, groups, eps, relu)
    return plain_group_norm(x, weight, bias, groups, eps, residual, relu)


def plain_group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return what `group_norm` does, in plain PyTorch; in float32 or wider, as the kernel does."""
    batch = len(x) // len(weight)
    shape = (len(x), x.shape[1], *[1] * (x.ndim - 2))
    scale, shift = (t.repeat_interleave(batch, dim=0).view(shape) for t in (weight, bias))
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.group_norm(x.to(wide), groups, eps=eps) * scale + shift
    y = y if residual is None else y + residual
    return (y.relu() if relu else y).to(x.dtype)
