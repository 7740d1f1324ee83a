"""`group_norm`: GroupNorm in which every client has its own scale and shift, fused with ReLU.

On a GPU forward and backward are one Triton kernel each (`normalisation_triton`);
`plain_group_norm` is their twin in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

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
        return differentiable(_GroupNorm, x, weight, bias, residual, groups, eps, relu)
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


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> Tensor:
        from fedexp.kernels import normalisation_triton

        x, residual = _channels_last(x), None if residual is None else _channels_last(residual)
        y, mean, rstd = normalisation_triton.forward(x, weight, bias, groups, eps, residual, relu)
        # backward needs the sign of y under ReLU; without a residual it is as cheap to recompute
        saved = y if relu and residual is not None else None
        ctx.save_for_backward(x, saved, weight, bias, mean, rstd)
        ctx.groups, ctx.relu, ctx.has_residual = groups, relu, residual is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedexp.kernels import normalisation_triton

        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dscale, dshift, masked = normalisation_triton.backward(
            _channels_last(dy), x, y, weight, bias, mean, rstd, ctx.groups, ctx.relu
        )
        dresidual = None if not ctx.has_residual else masked if ctx.relu else dy
        return dx, dscale, dshift, dresidual, None, None, None


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
