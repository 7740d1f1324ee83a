"""`group_norm`: GroupNorm in which every client has its own scale and shift, fused with ReLU.

On a GPU forward and backward are one Triton kernel each (`normalisation_triton`), behind custom ops
that are opaque to `torch.compile`; `plain_group_norm` is their twin in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.launch import has_triton


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
        y: Tensor = _fused(x, weight, bias, residual, groups, eps, relu)[0]
        return y
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


@torch.library.custom_op("fedexp::group_norm", mutates_args=())
def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedexp.kernels import normalisation_triton

    residual = None if residual is None else _channels_last(residual)
    return normalisation_triton.forward(
        _channels_last(x), weight, bias, groups, eps, residual, relu
    )


@torch.library.custom_op("fedexp::group_norm_gradients", mutates_args=())
def _gradients(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fedexp.kernels import normalisation_triton

    x = _channels_last(x)
    return normalisation_triton.backward(
        _channels_last(dy), x, y, weight, bias, mean, rstd, groups, relu
    )


@_fused.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(len(x), groups, dtype=torch.float32)
    return _channels_last(torch.empty_like(x)), statistics, torch.empty_like(statistics)


@_gradients.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dresidual = x.new_empty(0) if y is None else _channels_last(torch.empty_like(x))
    scales = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    return _channels_last(torch.empty_like(x)), *scales, dresidual


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, weight, bias, residual, ctx.groups, _, ctx.relu = inputs
    y, mean, rstd = output
    # backward needs the sign of y under ReLU; without a residual it is as cheap to recompute
    saved = y if ctx.relu and residual is not None else None
    ctx.save_for_backward(x, saved, weight, bias, mean, rstd)
    ctx.has_residual = residual is not None


def _backward(ctx: Any, dy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dscale, dshift, masked = _gradients(
        dy, x, y, weight, bias, mean, rstd, ctx.groups, ctx.relu
    )
    dresidual = None if not ctx.has_residual else masked if ctx.relu else dy
    return dx, dscale, dshift, dresidual, None, None, None


_fused.register_autograd(_backward, setup_context=_setup_context)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
