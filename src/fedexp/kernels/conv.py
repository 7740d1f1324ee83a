"""`convolve`: a convolution in which every client has weights of its own.

The way there and the way back are operators of their own for torch, opaque to compilers, and take
the forms that are fastest for their sizes. Where tf32 would do, operands are scaled to half
precision, once for all products they are part of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedexp.kernels.forms import convolved
from fedexp.kernels.geometry import Geometry
from fedexp.kernels.rooms import room_for
from fedexp.kernels.scaled import scaled_images, scaled_weights, takes_scaled


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW], bias [K, O].

    The images of a client are consecutive. On a GPU the result has its channels last in memory.

    >>> x, w = torch.ones(2, 1, 3, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    >>> convolve(x, w)[:, 0, 0, 0].tolist()
    [1.0, 2.0]
    """
    y: Tensor = _convolution(_images(x), weight, stride, padding)[0]
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(weight), dim=0)[:, :, None, None]


@torch.library.custom_op("fedexp::convolution", mutates_args=())
def _convolution(
    x: Tensor, w: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; and scaled images, scaled weights and their units, empty if nothing is scaled."""
    g = _geometry(x.shape, w.shape, stride, padding)
    if not takes_scaled(x, g):
        return convolved("forward", x, w, g), x.new_empty(0), x.new_empty(0), x.new_empty(0)
    (images, unit_x), (weights, unit_w) = scaled_images(x, g.clients), scaled_weights(w)
    y = convolved("forward", images, weights, g, (unit_x, unit_w))
    return y, images, weights, torch.stack([unit_x, unit_w])


@torch.library.custom_op("fedexp::convolution_gradients", mutates_args=())
def _gradients(
    dy: Tensor, images: Tensor, weights: Tensor, units: Tensor, w: Tensor, stride: int,
    padding: int, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of the images, if `back`, and of the weights; `w` tells where these are wanted."""
    g = _geometry(images.shape, w.shape, stride, padding)
    for_images, for_weights = None, None
    if units.numel():
        dy, unit = scaled_images(dy, g.clients)
        for_images, for_weights = (unit, units[1]), (unit, units[0])
    dw = convolved("weight_gradient", dy, images, g, for_weights, room_for(w))
    if not back:
        return dw.new_empty(0), dw
    return convolved("input_gradient", dy, weights, g, for_images), dw


@_convolution.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = _geometry(x.shape, w.shape, stride, padding)
    y = _images(x.new_empty(len(x), g.outputs, g.out_height, g.out_width))
    if not takes_scaled(x, g):
        return y, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    images = torch.empty_like(x, dtype=torch.float16, memory_format=torch.channels_last)
    return y, images, _like_weights(w, torch.float16), x.new_empty(2, g.clients)


@_gradients.register_fake
def _(
    dy: Tensor, images: Tensor, weights: Tensor, units: Tensor, w: Tensor, stride: int,
    padding: int, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = _images(dy.new_empty(images.shape)) if back else dy.new_empty(0)
    return dx, _like_weights(w, dy.dtype)


def _like_weights(w: Tensor, kind: torch.dtype) -> Tensor:
    clients, outputs, channels, *window = w.shape
    return w.new_empty(clients, outputs, *window, channels, dtype=kind).movedim(-1, 2)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, ctx.stride, ctx.padding = inputs
    _, images, weights, units = output
    ctx.set_materialize_grads(False)  # nobody needs zeros for what is only kept
    if units.numel():
        ctx.save_for_backward(images, weights, units, w)
    else:
        ctx.save_for_backward(x, w, units, w)


def _backward(
    ctx: Any, dy: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:  # nothing depends on the result
        return None, None, None, None
    wanted = ctx.needs_input_grad[0]
    dx, dw = _gradients(_images(dy), *ctx.saved_tensors, ctx.stride, ctx.padding, wanted)
    return dx if wanted else None, dw, None, None


_convolution.register_autograd(_backward, setup_context=_remember)


def _geometry(x: torch.Size, w: torch.Size, stride: int, padding: int) -> Geometry:
    clients, outputs, channels, tall, wide = w
    images, _, height, width = x
    sizes = (clients, images // clients, channels, height, width, outputs, tall, wide)
    return Geometry(*sizes, stride, padding)


def _images(x: Tensor) -> Tensor:
    """As the forms write them: channels last on a GPU, as they come elsewhere."""
    return x.contiguous(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)
