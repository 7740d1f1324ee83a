"""`products`: the product of a dense layer in which every client has weights of its own.

On a GPU it is an operator opaque to compilers, so that no operand is turned round: what libraries
are fast at, and the gradient of the weights comes in their own order, where it is wanted.

`flatten_images`: images whose channels lie last as vectors whose channels come first.

That turns every image round in memory. Compilers merge it with what comes before (dropout, pooling)
and then read all of that across its order; as an operator of its own it is a copy by tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import room_for


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows [K, B, F] times weights [K, O, F] plus bias [K, O]: [K, B, O].

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
    room = room_for(w)
    if room is None or room.dtype != x.dtype:
        return torch.bmm(dy.transpose(1, 2), x)
    return torch.bmm(dy.transpose(1, 2), x, out=room)


@_products.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1])


@_input_gradient.register_fake
def _(dy: Tensor, w: Tensor) -> Tensor:
    return dy.new_empty(*dy.shape[:2], w.shape[2])


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(w.shape)


def _remember_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    (x, w), dy = ctx.saved_tensors, dy.contiguous()
    dx = _input_gradient(dy, w) if ctx.needs_input_grad[0] else None
    return dx, _weight_gradient(dy, x, w) if ctx.needs_input_grad[1] else None


_products.register_autograd(_product_gradients, setup_context=_remember_factors)


def flatten_images(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N, C * H * W].

    >>> flatten_images(torch.arange(8.0).view(1, 2, 2, 2)).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    y: Tensor = _turned(x.permute(0, 2, 3, 1).flatten(1, 2))
    return y.flatten(1)


@torch.library.custom_op("fedexp::turned", mutates_args=())
def _turned(x: Tensor) -> Tensor:
    """[N, A, B] as [N, B, A], in memory."""
    if not (x.is_cuda and has_triton()):
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    from fedexp.kernels.convolution_triton import turned_matrices

    return turned_matrices(x.contiguous())


@_turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _remember_shape(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Turning back needs nothing."""


def _unflatten_gradient(ctx: Any, dy: Tensor) -> Tensor:
    back: Tensor = _turned(dy)
    return back


_turned.register_autograd(_unflatten_gradient, setup_context=_remember_shape)
