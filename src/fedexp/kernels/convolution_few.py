"""Triton convolutions for few input channels, such as the first layer of a network.

The taps of the window and the channels together form one short dimension, so a program gathers the
whole window of a pixel at once and writes the result in one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.convolution_torch import Geometry
from fedexp.kernels.convolution_triton import sizes
from fedexp.kernels.launch import launch, new_images

PIXELS = 128


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
    x, w, y, w_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
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
    product = tl.dot(a, b, input_precision="tf32").to(y.dtype.element_ty)
    tl.store(y + p[:, None] * OC + n[None, :], product, mask=inside[:, None] & (n < OC)[None, :])


@triton.jit(do_not_specialize=["B"])
def _weight_gradient_few(
    dy, x, dw, part, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradient of a part of the pixels (axis 2 of the grid), to be summed."""
    client = tl.program_id(1).to(tl.int64)
    x += client * (B * H * W * C)
    dy += client * (B * OH * OW * OC)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (OC * KH * KW * C)
    n, q = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BQ)
    acc = tl.zeros((BN, BQ), dtype=tl.float32)
    begin = tl.program_id(2) * part
    for start in range(begin, min(begin + part, B * OH * OW), BM):
        p = start + tl.arange(0, BM)
        inside = p < B * OH * OW
        known = inside[:, None] & (n < OC)[None, :]
        a = tl.load(dy + p[:, None] * OC + n[None, :], mask=known, other=0.0)
        b = _windows(x, p, inside, C, H, W, OH, OW, KH, KW, S, P, BQ)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="tf32")
    real = (n < OC)[:, None] & (q < KH * KW * C)[None, :]
    tl.store(dw + n[:, None] * (KH * KW * C) + q[None, :], acc, mask=real)


def forward(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """Return the convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW]."""
    y = new_images((g.clients * g.batch, g.outputs, g.out_height, g.out_width), x, x.dtype)
    wide = _wide(g)
    pixels = triton.cdiv(g.batch * g.out_height * g.out_width, PIXELS)
    grid = (pixels, g.clients, triton.cdiv(g.outputs, wide))
    launch(
        _forward_few,
        grid,
        x,
        w,
        y,
        w.stride(0),
        g.batch,
        **sizes(g),
        BM=PIXELS,
        BN=wide,
        BQ=_window(g),
        num_warps=4,
    )
    return y


def weight_gradient(dy: Tensor, x: Tensor, g: Geometry, parts: int = 16) -> Tensor:
    """Return the gradient with respect to the weights, [K, O, C, KH, KW]."""
    window = (g.kernel_height, g.kernel_width, g.channels)
    dw = torch.empty(parts, g.clients, g.outputs, *window, device=x.device)
    wide, pixels = _wide(g), g.batch * g.out_height * g.out_width
    part = triton.cdiv(triton.cdiv(pixels, parts), PIXELS) * PIXELS
    grid = (triton.cdiv(g.outputs, wide), g.clients, parts)
    launch(
        _weight_gradient_few,
        grid,
        dy,
        x,
        dw,
        part,
        g.batch,
        **sizes(g),
        BM=PIXELS,
        BN=wide,
        BQ=_window(g),
        num_warps=4,
    )
    return dw.sum(dim=0).to(x.dtype).movedim(-1, 2)


def _wide(g: Geometry) -> int:
    return max(16, min(64, triton.next_power_of_2(g.outputs)))


def _window(g: Geometry) -> int:
    return max(16, triton.next_power_of_2(g.kernel_height * g.kernel_width * g.channels))
