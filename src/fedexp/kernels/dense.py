"""Dense layers in which every client has its own weights, and the flattening before them.

On a GPU `products` calls the library's batched product in the layout it is fastest for, and writes
the gradient of the weights to its buffer; `flatten_images` transposes channels-last images tile by
tile, where a copy would read memory out of order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.launch import differentiable, has_triton
from fedexp.kernels.layers import weight_gradient


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [K, B, F] times weights [K, O, F] plus bias [K, O]: [K, B, O].

    >>> products(torch.ones(2, 1, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 3))
    tensor([[[3.]],
    <BLANKLINE>
            [[6.]]])
    """
    y = differentiable(_Products, x, weight)
    return y if bias is None else y + bias[:, None]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), dy = ctx.saved_tensors, dy.contiguous()
        dx = torch.bmm(dy, w) if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(dy, x, w) if ctx.needs_input_grad[1] else None


def flatten_images(x: Tensor) -> Tensor:
    """Return images [N, C, H, W] as vectors [N, C * H * W].

    >>> flatten_images(torch.arange(8.0).view(1, 2, 2, 2)).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    return differentiable(_Transpose, x.permute(0, 2, 3, 1).flatten(1, 2)).flatten(1)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _transposed(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _transposed(dy)


def _transposed(x: Tensor) -> Tensor:
    """Return matrices [N, A, B] as [N, B, A], contiguous."""
    if not (x.is_cuda and has_triton()):
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    from fedexp.kernels.convolution_triton import transposed_matrices

    return transposed_matrices(x.contiguous())
