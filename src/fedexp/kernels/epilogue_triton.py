"""Triton kernels of the epilogue of a layer; `epilogue` dispatches to them and has their twin.

A tensor is seen as pixels [K, P, C]: of images in channels-last memory format, or rows with one
pixel each. A program computes a few parts of the result pixels of one client, all of their channels
or a block of them; the parts share a draw of random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch, new_images
from fedexp.kernels.layers import sum_parts

BLOCK = 1024  # numbers of the result per part of a program
PARTS = 4  # as many as a draw of random numbers has
MOST_CHANNELS = 256


@triton.jit
def _greatest(x, pixel, c, real, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
              HW: tl.constexpr, C: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Return the greatest value of each window, and its place in the window."""
    image, within = pixel // (OH * OW), pixel % (OH * OW)
    corner = image * HW + (within // OW) * (POOL * W) + (within % OW) * POOL
    at = corner[:, None] * C + c[None, :]
    best = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    place = tl.zeros(best.shape, dtype=tl.int32)
    for tap in tl.static_range(1, POOL * POOL):
        value = tl.load(x + at + ((tap // POOL) * W + tap % POOL) * C, mask=real, other=0.0).to(
            tl.float32
        )
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        place = tl.where(better, tap, place)
    return best, place, at


@triton.jit
def _draws(seed, client, c, C: tl.constexpr, ROWS: tl.constexpr):
    """Return the random numbers of a program, one tensor per part: one call gives four."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tl.randint4x(tl.load(seed) + client, row[:, None] * C + c[None, :])


@triton.jit
def _dropped(value, part: tl.constexpr, one, two, three, four, DROPOUT: tl.constexpr):
    """Apply dropout to a part, by its draw."""
    if part == 0:
        draw = one
    elif part == 1:
        draw = two
    elif part == 2:
        draw = three
    else:
        draw = four
    stays = tl.uint_to_uniform_float(draw) >= DROPOUT
    return tl.where(stays, value * (1.0 / (1.0 - DROPOUT)), 0.0)


@triton.jit(do_not_specialize=["pixels", "images"])
def epilogue_kernel(
    x, bias, seed, y, bias_row, pixels, images,
    C: tl.constexpr, W: tl.constexpr, HW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x += client * images * HW * C
    y += client * pixels * C
    if BIAS:
        added = tl.load(bias + client * bias_row + c, mask=c < C, other=0.0).to(tl.float32)
    if DROPOUT > 0.0:
        one, two, three, four = _draws(seed, client, c, C, ROWS)
    for part in tl.static_range(PARTS):
        pixel = (tl.program_id(0) * PARTS + part) * ROWS + tl.arange(0, ROWS)
        real = (pixel < pixels)[:, None] & (c < C)[None, :]
        value, _, _ = _greatest(x, pixel, c, real, W, OH, OW, HW, C, POOL)
        if BIAS:
            value += added[None, :]
        if RELU:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if DROPOUT > 0.0:
            value = _dropped(value, part, one, two, three, four, DROPOUT)
        tl.store(y + pixel[:, None] * C + c[None, :], value.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["pixels", "images"])
def epilogue_gradient_kernel(
    dy, x, bias, seed, dx, sums, bias_row, pixels, images,
    C: tl.constexpr, W: tl.constexpr, HW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x += client * images * HW * C
    dx += client * images * HW * C
    dy += client * pixels * C
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    if BIAS:
        added = tl.load(bias + client * bias_row + c, mask=c < C, other=0.0).to(tl.float32)
    if DROPOUT > 0.0:
        one, two, three, four = _draws(seed, client, c, C, ROWS)
    for part in tl.static_range(PARTS):
        pixel = (tl.program_id(0) * PARTS + part) * ROWS + tl.arange(0, ROWS)
        real = (pixel < pixels)[:, None] & (c < C)[None, :]
        at = pixel[:, None] * C + c[None, :]
        gradient = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
        if DROPOUT > 0.0:
            gradient = _dropped(gradient, part, one, two, three, four, DROPOUT)
        if RELU or POOL > 1:
            value, place, source = _greatest(x, pixel, c, real, W, OH, OW, HW, C, POOL)
            if RELU:
                if BIAS:
                    value += added[None, :]
                gradient = tl.where(value <= 0.0, 0.0, gradient)
            for tap in tl.static_range(POOL * POOL):
                own = tl.where(place == tap, gradient, 0.0)
                shift = ((tap // POOL) * W + tap % POOL) * C
                tl.store(dx + source + shift, own.to(dx.dtype.element_ty), mask=real)
        else:
            tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=real)
        total += tl.sum(gradient, axis=0)
    if BIAS:
        block = client * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums + block * C + c, total, mask=c < C)


class FusedEpilogue(torch.autograd.Function):
    """The epilogue of a product, whose backward pass may write to the buffer of the bias."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, bias: Tensor | None, relu: bool, pool: int, dropout: float
    ) -> Tensor:
        # drawn on the device, so that a captured graph draws anew at every replay
        seed = torch.randint(2**31, (1,), device=product.device) if dropout else None
        product = _in_kernel_order(product)
        operands, sizes, grid = _arguments(product, bias, seed, relu, pool, dropout)
        if product.ndim == 4:
            shape = (*product.shape[:2], sizes["OH"], sizes["OW"])
            y = new_images(shape, product, product.dtype)
        else:
            y = torch.empty_like(product)
        launch(epilogue_kernel, grid, *operands, y=y, **sizes)
        ctx.save_for_backward(product, bias, seed)
        ctx.settings = relu, pool, dropout
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        product, bias, seed = ctx.saved_tensors
        operands, sizes, grid = _arguments(product, bias, seed, *ctx.settings)
        covered = sizes["OH"] * sizes["OW"] * sizes["POOL"] ** 2 == sizes["HW"]
        dx = torch.empty_like(product) if covered else torch.zeros_like(product)
        sums = torch.empty(grid[1], grid[0], sizes["C"], device=product.device)
        dy = _in_kernel_order(dy)
        launch(epilogue_gradient_kernel, grid, dy, *operands, dx=dx, sums=sums, **sizes)
        return dx, None if bias is None else sum_parts(sums[None], bias)[0], None, None, None


def _in_kernel_order(x: Tensor) -> Tensor:
    """Return images channels last in memory, rows contiguous."""
    kind = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return x.contiguous(memory_format=kind)


def _arguments(
    product: Tensor, bias: Tensor | None, seed: Tensor | None, relu: bool, pool: int,
    dropout: float,
) -> tuple[tuple[Tensor, ...], dict[str, Any], tuple[int, int, int]]:  # fmt: skip
    """Return the operands and the settings that both kernels take, and their grid."""
    if product.ndim == 4:
        clients = 1 if bias is None else len(bias)
        channels, height, width = product.shape[1:]
        images = len(product) // clients
    else:
        clients, images, channels = product.shape
        height = width = 1
    tall, wide = height // pool, width // pool
    columns = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    pixels = images * tall * wide
    rows = BLOCK // columns
    others = product if bias is None else bias, product if seed is None else seed
    sizes = {
        "bias_row": 0 if bias is None else bias.stride(0), "pixels": pixels, "images": images,
        "C": channels, "W": width, "HW": height * width, "OH": tall, "OW": wide, "POOL": pool,
        "BIAS": bias is not None, "RELU": relu, "DROPOUT": dropout,
        "ROWS": rows, "COLUMNS": columns, "PARTS": PARTS, "num_warps": 4,
    }  # fmt: skip
    grid = (triton.cdiv(pixels, rows * PARTS), clients, triton.cdiv(channels, columns))
    return (product, *others), sizes, grid
