"""Dense layers in which every client has its own weights, and the flattening before them.

On a GPU both are custom ops, opaque to `torch.compile`, which would otherwise transpose operands in
memory. `products` calls the library's batched product in the layout it is fastest for, and writes
the gradient of the weights to its buffer. `flatten_images` transposes channels-last images tile by
tile; fused with the layer before it (dropout, pooling) it would read memory out of order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import gradient_buffer


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [K, B, F] times weights [K, O, F] plus bias [K, O]: [K, B, O].

    >>> products(torch.ones(2, 1, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 3))
    tensor([[[3.]],
    <BLANKLINE>
            [[6.]]])
    """
    y: Tensor = _products(x, weight)
    return y if bias is None else y + bias[:, None]


@torch.library.custom_op("fedexp::products", mutates_args=())
def _products(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w.transpose(1, 2))


@torch.library.custom_op("fedexp::products_input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(dy, w)


@torch.library.custom_op("fedexp::products_weight_gradient", mutates_args=())
def _weight_gradient(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    buffer = gradient_buffer(w)
    if buffer is None or buffer.dtype != x.dtype:
        return torch.bmm(dy.transpose(1, 2), x)
    return torch.bmm(dy.transpose(1, 2), x, out=buffer)


@_products.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1])


@_input_gradient.register_fake
def _(dy: Tensor, w: Tensor) -> Tensor:
    return dy.new_empty(*dy.shape[:2], w.shape[2])


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(w.shape)


def _save_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    (x, w), dy = ctx.saved_tensors, dy.contiguous()
    dx = _input_gradient(dy, w) if ctx.needs_input_grad[0] else None
    return dx, _weight_gradient(dy, x, w) if ctx.needs_input_grad[1] else None


_products.register_autograd(_product_gradients, setup_context=_save_factors)


def flatten_images(x: Tensor) -> Tensor:
    """Return images [N, C, H, W] as vectors [N, C * H * W].

    >>> flatten_images(torch.arange(8.0).view(1, 2, 2, 2)).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    y: Tensor = _transpose(x.permute(0, 2, 3, 1).flatten(1, 2))
    return y.flatten(1)


@torch.library.custom_op("fedexp::transpose", mutates_args=())
def _transpose(x: Tensor) -> Tensor:
    """Return matrices [N, A, B] as [N, B, A], contiguous."""
    if not (x.is_cuda and has_triton()):
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    from fedexp.kernels.convolution_triton import transposed_matrices

    return transposed_matrices(x.contiguous())


@_transpose.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _transpose_gradient(ctx: Any, dy: Tensor) -> Tensor:
    dx: Tensor = _transpose(dy)
    return dx


_transpose.register_autograd(_transpose_gradient)
