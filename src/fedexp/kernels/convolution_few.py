"""Triton convolutions for few input channels, such as the first layer of a network.

The taps of the window and the channels together form one short dimension, so a program gathers the
whole window of a pixel at once and writes the result in one pass. Memory traffic is most of the
time, so a bias and a ReLU are applied in the same pass, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.convolution_torch import Geometry
from fedexp.kernels.convolution_triton import sizes
from fedexp.kernels.launch import launch, new_images
from fedexp.kernels.layers import sum_parts

PIXELS = 128
PARTS = 48  # of the pixels of a client, whose weight gradients are summed


@triton.jit
def _windows(x, p, inside, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
             OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr,
             P: tl.constexpr, BQ: tl.constexpr):  # fmt: skip
    """Return the window of each output pixel, [pixels, KH * KW * C]."""
    q = tl.arange(0, BQ)
    tap, c = q // C, q % C
    image, pixel = p // (OH * OW), p % (OH * OW)
    h = ((pixel // OW) * S - P)[:, None] + (tap // KW)[None, :]
    v = ((pixel % OW) * S - P)[:, None] + (tap % KW)[None, :]
    real = inside[:, None] & (q < KH * KW * C)[None, :] & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    return tl.load(x + ((image[:, None] * H + h) * W + v) * C + c[None, :], mask=real, other=0.0)


@triton.jit(do_not_specialize=["B"])
def _forward_few(
    x, w, bias, y, w_row, bias_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Return the convolution; with RELU, its bias is added and the ReLU applied."""
    client = tl.program_id(1).to(tl.int64)
    x += client * (B * H * W * C)
    w += client * w_row
    y += client * (B * OH * OW * OC)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    n, q = tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BQ)
    inside = p < B * OH * OW
    a = _windows(x, p, inside, C, H, W, OH, OW, KH, KW, S, P, BQ)
    known = (n < OC)[None, :] & (q < KH * KW * C)[:, None]
    b = tl.load(w + n[None, :] * (KH * KW * C) + q[:, None], mask=known, other=0.0)
    product = tl.dot(a, b, input_precision="tf32")
    if RELU:
        added = tl.load(bias + client * bias_row + n, mask=n < OC, other=0.0).to(tl.float32)
        product = tl.maximum(product + added[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
    at = p[:, None] * OC + n[None, :]
    real = inside[:, None] & (n < OC)[None, :]
    tl.store(y + at, product.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["B"])
def _weight_gradient_few(
    dy, y, x, dw, sums, part, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradient of a part of the pixels (axis 2 of the grid), to be summed.

    With RELU, dy is the gradient of its result y, and the gradient of the bias is computed too.
    """
    client = tl.program_id(1).to(tl.int64)
    x += client * (B * H * W * C)
    dy += client * (B * OH * OW * OC)
    y += client * (B * OH * OW * OC)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (OC * KH * KW * C)
    n, q = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BQ)
    acc = tl.zeros((BN, BQ), dtype=tl.float32)
    total = tl.zeros((BN,), dtype=tl.float32)
    begin = tl.program_id(2) * part
    for start in range(begin, min(begin + part, B * OH * OW), BM):
        p = start + tl.arange(0, BM)
        inside = p < B * OH * OW
        known = inside[:, None] & (n < OC)[None, :]
        a = tl.load(dy + p[:, None] * OC + n[None, :], mask=known, other=0.0)
        if RELU:
            result = tl.load(y + p[:, None] * OC + n[None, :], mask=known, other=0.0)
            a = tl.where(result <= 0.0, 0.0, a).to(dy.dtype.element_ty)
            total += tl.sum(a.to(tl.float32), axis=0)
        b = _windows(x, p, inside, C, H, W, OH, OW, KH, KW, S, P, BQ)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="tf32")
    real = (n < OC)[:, None] & (q < KH * KW * C)[None, :]
    tl.store(dw + n[:, None] * (KH * KW * C) + q[None, :], acc, mask=real)
    if RELU:
        part_of_client = tl.program_id(2) * tl.num_programs(1) + client
        tl.store(sums + part_of_client * OC + n, total, mask=n < OC)


def forward(x: Tensor, w: Tensor, g: Geometry, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW].

    With a bias, [K, O], it is added and a ReLU applied.
    """
    y = new_images((g.clients * g.batch, g.outputs, g.out_height, g.out_width), x, x.dtype)
    wide, added = _wide(g), w if bias is None else bias
    pixels = triton.cdiv(g.batch * g.out_height * g.out_width, PIXELS)
    launch(
        _forward_few, (pixels, g.clients, triton.cdiv(g.outputs, wide)),
        x, w, added, y, w.stride(0), added.stride(0), g.batch,
        **sizes(g), BM=PIXELS, BN=wide, BQ=_window(g), RELU=bias is not None, num_warps=4,
    )  # fmt: skip
    return y


def weight_gradient(dy: Tensor, x: Tensor, g: Geometry) -> Tensor:
    """Return the gradient with respect to the weights, [K, O, C, KH, KW]."""
    dw, _ = _partial_gradients(dy, None, x, g)
    return dw.sum(dim=0).to(x.dtype).movedim(-1, 2)


class ConvolutionReLU(torch.autograd.Function):
    """The ReLU of a convolution and its bias; gradients may be in their buffers (`sum_parts`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, g: Geometry) -> Tensor:
        y = forward(x, w, g, bias)
        ctx.save_for_backward(x, w, bias, y)
        ctx.geometry = g
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w, bias, y), g = ctx.saved_tensors, ctx.geometry
        dw, sums = _partial_gradients(dy.contiguous(memory_format=torch.channels_last), y, x, g)
        (dbias,) = sum_parts(sums.transpose(0, 1)[None], bias)
        rows = w.movedim(2, -1).flatten(1)  # in the memory order of weights, so it is a view
        if rows.data_ptr() != w.data_ptr():
            return None, dw.sum(dim=0).to(x.dtype).movedim(-1, 2), dbias, None
        (dweight,) = sum_parts(dw.flatten(2).transpose(0, 1)[None], rows)
        if dweight is not None:
            dweight = dweight.view(dw.shape[1:]).movedim(-1, 2)
        return None, dweight, dbias, None


def _partial_gradients(
    dy: Tensor, y: Tensor | None, x: Tensor, g: Geometry
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights [parts, K, O, KH, KW, C] and bias [parts, K, O]."""
    window = (g.kernel_height, g.kernel_width, g.channels)
    dw = torch.empty(PARTS, g.clients, g.outputs, *window, device=x.device)
    sums = torch.empty(PARTS, g.clients, g.outputs, device=x.device)
    wide, pixels = _wide(g), g.batch * g.out_height * g.out_width
    part = triton.cdiv(triton.cdiv(pixels, PARTS), PIXELS) * PIXELS
    launch(
        _weight_gradient_few, (triton.cdiv(g.outputs, wide), g.clients, PARTS),
        dy, dy if y is None else y, x, dw, sums, part, g.batch,
        **sizes(g), BM=PIXELS, BN=wide, BQ=_window(g), RELU=y is not None, num_warps=4,
    )  # fmt: skip
    return dw, sums


def _wide(g: Geometry) -> int:
    return max(16, min(64, triton.next_power_of_2(g.outputs)))


def _window(g: Geometry) -> int:
    return max(16, triton.next_power_of_2(g.kernel_height * g.kernel_width * g.channels))
