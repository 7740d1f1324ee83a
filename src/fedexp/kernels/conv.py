"""`convolve`: a convolution in which every client has weights of its own.

Each direction is an operator of its own for torch, opaque to compilers, and takes the form that is
fastest for its sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.forms import chosen_form, writes_to_rooms
from fedexp.kernels.geometry import Geometry
from fedexp.kernels.rooms import room_for


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW], bias [K, O].

    The images of a client are consecutive. On a GPU the result has its channels last in memory.

    >>> x, w = torch.ones(2, 1, 3, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    >>> convolve(x, w)[:, 0, 0, 0].tolist()
    [1.0, 2.0]
    """
    y: Tensor = _convolution(_images(x), weight, stride, padding)
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(weight), dim=0)[:, :, None, None]


@torch.library.custom_op("fedexp::convolution", mutates_args=())
def _convolution(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    g = _geometry(x.shape, w.shape, stride, padding)
    return chosen_form("forward", x, w, g)(x, w, g)


@torch.library.custom_op("fedexp::convolution_input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, w: Tensor, x_shape: list[int], s: int, p: int) -> Tensor:
    g = _geometry(torch.Size(x_shape), w.shape, s, p)
    return chosen_form("input_gradient", dy, w, g)(dy, w, g)


@torch.library.custom_op("fedexp::convolution_weight_gradient", mutates_args=())
def _weight_gradient(dy: Tensor, x: Tensor, w: Tensor, s: int, p: int) -> Tensor:
    g = _geometry(x.shape, w.shape, s, p)
    form = chosen_form("weight_gradient", dy, x, g)
    room = room_for(w)
    return form(dy, x, g, room) if room is not None and writes_to_rooms(form) else form(dy, x, g)


@_convolution.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    g = _geometry(x.shape, w.shape, stride, padding)
    return _images(x.new_empty(len(x), g.outputs, g.out_height, g.out_width))


@_input_gradient.register_fake
def _(dy: Tensor, w: Tensor, x_shape: list[int], s: int, p: int) -> Tensor:
    return _images(dy.new_empty(x_shape))


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor, s: int, p: int) -> Tensor:
    clients, outputs, channels, *window = w.shape
    return x.new_empty(clients, outputs, *window, channels).movedim(-1, 2)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    (x, w), dy = ctx.saved_tensors, _images(dy)
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _input_gradient(dy, w, list(x.shape), ctx.stride, ctx.padding)
    if ctx.needs_input_grad[1]:
        dw = _weight_gradient(dy, x, w, ctx.stride, ctx.padding)
    return dx, dw, None, None


_convolution.register_autograd(_backward, setup_context=_remember)


def _geometry(x: torch.Size, w: torch.Size, stride: int, padding: int) -> Geometry:
    clients, outputs, channels, tall, wide = w
    images, _, height, width = x
    sizes = (clients, images // clients, channels, height, width, outputs, tall, wide)
    return Geometry(*sizes, stride, padding)


def _images(x: Tensor) -> Tensor:
    """As the forms write them: channels last on a GPU, as they come elsewhere."""
    return x.contiguous(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)
