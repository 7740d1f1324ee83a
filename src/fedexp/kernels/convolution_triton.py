"""Triton convolutions in which every client has its own weights, as tiled matrix products.

Implicit matrix products: pixels are rows, channels are columns, and a program loops over the taps
of the window, so nothing is unfolded in memory. Images are [K, B, H, W, C] and weights
[K, O, KH, KW, C] in memory (channels last); clients' weights may be any stride apart.

A `Tiling` sets how a kernel splits its product. Tilings have names, under which the measured choice
is stored (`convolution`); `likely_tilings` has the candidates for given sizes. At the end are
two kernels that the convolutions and dense layers share: scaling to half precision (the twin of
`convolution_torch.plain_scaled_half`), and transposing matrices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.convolution_torch import LARGEST_EXPONENT, TARGET, Geometry, Units, result_type
from fedexp.kernels.launch import launch, new_images


@triton.jit
def _add_product(acc, a, b, row, column, k, LAST: tl.constexpr, BK: tl.constexpr,
                 SWAP: tl.constexpr):  # fmt: skip
    """Add the product of two tiles, zero outside of the rows, the columns and LAST terms."""
    if LAST % BK == 0:
        a = tl.load(a, mask=row[:, None], other=0.0)
        b = tl.load(b, mask=column[None, :], other=0.0)
    else:
        a = tl.load(a, mask=row[:, None] & (k < LAST)[None, :], other=0.0)
        b = tl.load(b, mask=column[None, :] & (k < LAST)[:, None], other=0.0)
    if SWAP:
        acc = tl.dot(tl.trans(b), tl.trans(a), acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32")
    return acc


@triton.jit
def unscaled(acc, unit_a, unit_b, client, SCALED: tl.constexpr):
    """Undo the scales of the operands.

    One unit after the other, because their product might underflow; the smaller first, because the
    larger alone might overflow.
    """
    if SCALED:
        one, other = tl.load(unit_a + client), tl.load(unit_b + client)
        acc = acc * tl.minimum(one, other) * tl.maximum(one, other)
    return acc


@triton.jit
def store_taps(at, mask, one, two, three, unit_a, unit_b, client, C: tl.constexpr,
               TAPS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Store the weight gradient of a tap, or of three in a row, whose operands were scaled."""
    tl.store(at, unscaled(one, unit_a, unit_b, client, SCALED), mask=mask)
    if TAPS == 3:
        two = unscaled(two, unit_a, unit_b, client, SCALED)
        three = unscaled(three, unit_a, unit_b, client, SCALED)
        tl.store(at + C, two, mask=mask)
        tl.store(at + 2 * C, three, mask=mask)


@triton.jit(do_not_specialize=["B"])
def forward_kernel(
    x, w, y, unit_x, unit_w, w_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum over taps and c of x[m shifted by the tap, c] w[n, tap, c]."""
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (OC + BN - 1) // BN
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image, pixel = m // (OH * OW), m % (OH * OW)
    top, left = (pixel // OW) * S - P, (pixel % OW) * S - P
    x += client * (B * H * W * C)
    w += client * w_row
    y += client * (B * OH * OW * OC)
    depth: tl.constexpr = (C + BK - 1) // BK
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for step in range(KH * KW * depth):
        tap, c = step // depth, (step % depth) * BK + tl.arange(0, BK)
        h, v = top + tap // KW, left + tap % KW
        inside = (m < B * OH * OW) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        from_x = ((image * H + h) * W + v)[:, None] * C + c[None, :]
        from_w = (n * (KH * KW) + tap)[None, :] * C + c[:, None]
        acc = _add_product(acc, x + from_x, w + from_w, inside, n < OC, c, C, BK, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    acc = unscaled(acc, unit_x, unit_w, client, SCALED)
    at = m[:, None] * OC + n[None, :]
    tl.store(
        y + at, acc.to(y.dtype.element_ty), mask=(m < B * OH * OW)[:, None] & (n < OC)[None, :]
    )


@triton.jit(do_not_specialize=["B"])
def input_gradient_kernel(
    dy, w, dx, unit_dy, unit_w, w_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dx[m, n] = sum over taps and o of dy[output of m under the tap, o] w[o, tap, n].

    With a stride S, pixels fall into S x S classes (axis 2 of the grid) that use different taps.
    """
    client = tl.program_id(1).to(tl.int64)
    ph, pw = tl.program_id(2) // S, tl.program_id(2) % S
    HC: tl.constexpr = (H + S - 1) // S
    WC: tl.constexpr = (W + S - 1) // S
    across: tl.constexpr = (C + BN - 1) // BN
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image, pixel = m // (HC * WC), m % (HC * WC)
    i, j = pixel // WC, pixel % WC
    h, v = ph + S * i, pw + S * j
    first_h, first_w = (ph + P) % S, (pw + P) % S
    top, left = (ph + P - first_h) // S + i, (pw + P - first_w) // S + j
    taps_w = (KW - first_w + S - 1) // S
    taps = ((KH - first_h + S - 1) // S) * taps_w
    dy += client * (B * OH * OW * OC)
    w += client * w_row
    dx += client * (B * H * W * C)
    depth: tl.constexpr = (OC + BK - 1) // BK
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for step in range(taps * depth):
        tap, o = step // depth, (step % depth) * BK + tl.arange(0, BK)
        down, right = tap // taps_w, tap % taps_w
        oh, ow = top - down, left - right
        inside = (image < B) & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
        window = (first_h + S * down) * KW + first_w + S * right
        from_dy = ((image * OH + oh) * OW + ow)[:, None] * OC + o[None, :]
        from_w = (o * (KH * KW) + window)[:, None] * C + n[None, :]
        acc = _add_product(acc, dy + from_dy, w + from_w, inside, n < C, o, OC, BK, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    acc = unscaled(acc, unit_dy, unit_w, client, SCALED)
    at = ((image * H + h) * W + v)[:, None] * C + n[None, :]
    real = (image < B) & (h < H) & (v < W)
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=real[:, None] & (n < C)[None, :])


@triton.jit
def _shifted(x, image, top, left, inside, c, tap, C: tl.constexpr, H: tl.constexpr,
             W: tl.constexpr, KW: tl.constexpr):  # fmt: skip
    """Return the pixels [depth, channels] of x under a tap."""
    h, v = top + tap // KW, left + tap % KW
    inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = ((image * H + h) * W + v)[:, None] * C + c[None, :]
    return tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)


@triton.jit(do_not_specialize=["B"])
def weight_gradient_kernel(
    dy, x, dw, unit_dy, unit_x, part, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAPS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, c] = sum over pixels of dy[pixel, o] x[pixel shifted by the tap, c].

    A program computes one tap, or the three taps of a row of the window, so that dy is read once.
    Axis 2 of the grid splits the pixels into parts of `part` each.
    """
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (C + BN - 1) // BN
    down: tl.constexpr = (OC + BM - 1) // BM
    tile, tap = tl.program_id(0) % (across * down), tl.program_id(0) // (across * down) * TAPS
    o = (tile // across) * BM + tl.arange(0, BM)
    c = (tile % across) * BN + tl.arange(0, BN)
    dy += client * (B * OH * OW * OC)
    x += client * (B * H * W * C)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (OC * KH * KW * C)
    one = tl.zeros((BM, BN), dtype=tl.float32)
    two, three = one, one
    begin = tl.program_id(2) * part
    for start in range(begin, min(begin + part, B * OH * OW), BK):
        p = start + tl.arange(0, BK)
        image, pixel = p // (OH * OW), p % (OH * OW)
        inside = (p < B * OH * OW) & (p < begin + part)
        top, left = (pixel // OW) * S - P, (pixel % OW) * S - P
        from_dy = p[:, None] * OC + o[None, :]
        a = tl.load(dy + from_dy, mask=inside[:, None] & (o < OC)[None, :], other=0.0)
        a = tl.trans(a)
        b = _shifted(x, image, top, left, inside, c, tap, C, H, W, KW)
        one = tl.dot(a, b, one, input_precision="tf32")
        if TAPS == 3:
            b = _shifted(x, image, top, left, inside, c, tap + 1, C, H, W, KW)
            two = tl.dot(a, b, two, input_precision="tf32")
            b = _shifted(x, image, top, left, inside, c, tap + 2, C, H, W, KW)
            three = tl.dot(a, b, three, input_precision="tf32")
    at = (o[:, None] * (KH * KW) + tap) * C + c[None, :]
    real = (o < OC)[:, None] & (c < C)[None, :]
    store_taps(dw + at, real, one, two, three, unit_dy, unit_x, client, C, TAPS, SCALED)


@dataclass(frozen=True)
class Tiling:
    """How a kernel splits its product.

    Attributes:
        rows: rows of the result per program.
        columns: columns of the result per program.
        depth: terms of the sum per iteration.
        warps: warps per program.
        stages: stages of the software pipeline.
        swap: make channels the rows of the tensor-core product, for few channels; for a weight
            gradient, compute the three taps of a row in one program.
        split: parts of the sum over pixels of a weight gradient.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    split: int = 1


def forward(
    x: Tensor, w: Tensor, g: Geometry, *, tiling: Tiling, units: Units | None = None
) -> Tensor:
    """Return the convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW]."""
    shape = (g.clients * g.batch, g.outputs, g.out_height, g.out_width)
    y = new_images(shape, x, result_type(x, units))
    tiles = triton.cdiv(g.batch * g.out_height * g.out_width, tiling.rows)
    grid = (tiles * triton.cdiv(g.outputs, tiling.columns), g.clients)
    _launch(forward_kernel, grid, (x, w, y), units, w.stride(0), g, tiling, SWAP=tiling.swap)
    return y


def input_gradient(
    dy: Tensor, w: Tensor, g: Geometry, *, tiling: Tiling, units: Units | None = None
) -> Tensor:
    """Return the gradient with respect to the images."""
    shape = (g.clients * g.batch, g.channels, g.height, g.width)
    dx = new_images(shape, dy, result_type(dy, units))
    s = g.stride
    tiles = triton.cdiv(g.batch * -(-g.height // s) * -(-g.width // s), tiling.rows)
    grid = (tiles * triton.cdiv(g.channels, tiling.columns), g.clients, s * s)
    _launch(
        input_gradient_kernel, grid, (dy, w, dx), units, w.stride(0), g, tiling, SWAP=tiling.swap
    )
    return dx


def weight_gradient(
    dy: Tensor, x: Tensor, g: Geometry, *, tiling: Tiling, buffer: Tensor | None = None,
    units: Units | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to the weights, [K, O, C, KH, KW], in `buffer` if given."""
    taps = 3 if tiling.swap and g.kernel_width == 3 else 1
    window = (g.kernel_height, g.kernel_width)
    dtype = result_type(x, units)
    dw = partial_sums(x, g, tiling.split, buffer, dtype)
    pixels = g.batch * g.out_height * g.out_width
    part = triton.cdiv(triton.cdiv(pixels, tiling.split), tiling.depth) * tiling.depth
    tiles = triton.cdiv(g.outputs, tiling.rows) * triton.cdiv(g.channels, tiling.columns)
    grid = (tiles * window[0] * window[1] // taps, g.clients, tiling.split)
    _launch(weight_gradient_kernel, grid, (dy, x, dw), units, part, g, tiling, TAPS=taps)
    return sum_of_parts(dw, buffer, dtype)


def partial_sums(
    x: Tensor, g: Geometry, parts: int, buffer: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return memory [parts, K, O, KH, KW, C] for the sums over parts of the pixels.

    A single part is the result: its memory is the buffer, if there is one of its type.
    """
    shape = (g.clients, g.outputs, g.kernel_height, g.kernel_width, g.channels)
    if parts > 1:
        return torch.empty((parts, *shape), dtype=torch.float32, device=x.device)
    if buffer is not None and buffer.dtype == dtype:
        return buffer.movedim(2, -1)[None]
    return torch.empty((1, *shape), dtype=dtype, device=x.device)


def sum_of_parts(parts: Tensor, buffer: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of the parts, [K, O, C, KH, KW]."""
    if len(parts) == 1:
        total = parts[0]
    elif buffer is None:
        total = parts.sum(dim=0).to(dtype)
    else:
        total = buffer.movedim(2, -1).copy_(parts.sum(dim=0))
    return total.permute(0, 1, 4, 2, 3)


def sizes(g: Geometry) -> dict[str, int]:
    """Return the sizes by their names in the kernels."""
    return {
        "C": g.channels, "H": g.height, "W": g.width,
        "OC": g.outputs, "OH": g.out_height, "OW": g.out_width,
        "KH": g.kernel_height, "KW": g.kernel_width, "S": g.stride, "P": g.padding,
    }  # fmt: skip


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, Tensor, Tensor],
    units: Units | None, number: int, g: Geometry, tiling: Tiling, **flags: Any,
) -> None:  # fmt: skip
    """Launch a kernel of two operands and a result; `number` is its argument before the batch."""
    launch(
        kernel, grid, *tensors, *(units or tensors[:2]), number, g.batch,
        **sizes(g), BM=tiling.rows, BN=tiling.columns, BK=tiling.depth,
        num_warps=tiling.warps, num_stages=tiling.stages, **flags, SCALED=units is not None,
    )  # fmt: skip


def name_of(t: Tiling) -> str:
    """Return the name of a tiling.

    >>> name_of(Tiling(128, 64, 64, warps=4, stages=3, swap=True, split=4))
    '128x64x64w4s3t/4'
    """
    swap, parts = "t" if t.swap else "", f"/{t.split}" if t.split > 1 else ""
    return f"{t.rows}x{t.columns}x{t.depth}w{t.warps}s{t.stages}{swap}{parts}"


def tiling_named(name: str) -> Tiling:
    """Return the tiling of a name.

    >>> tiling_named("128x64x64w4s3t/4")
    Tiling(rows=128, columns=64, depth=64, warps=4, stages=3, swap=True, split=4)
    """
    return Tiling(*settings_named(name))


def settings_named(name: str) -> tuple[Any, ...]:
    """Return the numbers in the name of a tiling or a box, whether it has a "t", and its parts."""
    sizes, _, parts = name.partition("/")
    return *map(int, re.findall(r"\d+", sizes)), sizes.endswith("t"), int(parts or 1)


def likely_tilings(direction: str, g: Geometry, bytes_each: int) -> list[str]:
    """Return two to four names, the likeliest first, from measurements on an H200."""
    if direction == "weight_gradient":
        found = _weight_tilings(g, bytes_each)
    elif direction == "forward":
        found = _image_tilings(g.outputs, g.channels, g, bytes_each)
    else:
        found = _image_tilings(g.channels, g.outputs, g, bytes_each)
    return list(dict.fromkeys(name_of(t) for t in found))


def _image_tilings(columns: int, depth: int, g: Geometry, bytes_each: int) -> list[Tiling]:
    """Return tiles of pixels x channels; 128 bytes of the sum at a time."""
    deep = _power_of_two(16, depth, 128 // bytes_each)
    wide = _power_of_two(16, columns, 256)
    if wide <= 64:
        found = [Tiling(128, wide, deep, 4, 3), Tiling(128, wide, deep, 4, 4, swap=wide == 64)]
        if bytes_each > 2:
            return found
        return [*found, Tiling(256, wide, deep, 8, 3), Tiling(256, wide, deep, 4, 3)]
    if wide == 128:
        return [Tiling(128, 128, deep, 4, 3), Tiling(128, 128, deep, 8, 3)]
    few = g.out_height * g.out_width * g.batch <= 1024  # large tiles would leave cores idle
    small, large = Tiling(64, 256, deep, 4, 4), Tiling(128, 256, deep, 8, 3)
    return [small, large] if few else [large, small]


def _weight_tilings(g: Geometry, bytes_each: int) -> list[Tiling]:
    """Return tiles of outputs x channels."""
    deep, rows = 128 // bytes_each, _power_of_two(16, g.outputs, 128)
    narrow, three = _power_of_two(16, g.channels, 64), g.kernel_width == 3
    tiles = -(-g.outputs // rows) * -(-g.channels // narrow) * g.kernel_height * g.clients
    tiles *= 1 if three else g.kernel_width
    split = next((s for s in (1, 2, 4, 8) if tiles * s >= 240), 16)
    found = [Tiling(rows, narrow, deep, 4, 3 if three else 4, three, split)]
    if g.channels >= 128:
        return [*found, Tiling(rows, 128, deep, 8, 3)]
    return [*found, Tiling(rows, narrow, deep, 4, 3 if three else 4, three, 2 * split)]


def _power_of_two(least: int, size: int, most: int) -> int:
    """Return the power of two that covers `size`, within the bounds."""
    return max(least, min(most, 1 << (size - 1).bit_length()))


LARGEST_LENGTH, CONVERT_LENGTH = 16384, 4096  # numbers per program


@triton.jit
def largest_kernel(x, bits, row, size, LENGTH: tl.constexpr):
    """Store the bits of the largest absolute value; they sort as the values do, NaN last."""
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    values = tl.load(x + client * row + i, mask=i < size, other=0.0)
    seen = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(bits + client, tl.max(seen, axis=0), sem="relaxed")


@triton.jit
def convert_kernel(x, bits, half, unit, row, size, TARGET: tl.constexpr, MOST: tl.constexpr,
                   LENGTH: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    own = tl.load(bits + client) >> 23
    exponent = tl.minimum(TARGET - own, MOST)
    exponent = tl.where(own == 255, 127, exponent)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    i = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    values = tl.load(x + client * row + i, mask=i < size, other=0.0)
    tl.store(half + client * size + i, (values * scale).to(tl.float16), mask=i < size)
    if tl.program_id(0) == 0:
        tl.store(unit + client, ((254 - exponent) << 23).to(tl.float32, bitcast=True))


def scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [K, n] scaled to half precision, and the unit that undoes the scale, [K]."""
    clients, size = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bits = torch.zeros(clients, dtype=torch.int32, device=rows.device)
    half = torch.empty((clients, size), dtype=torch.float16, device=rows.device)
    unit = torch.empty(clients, dtype=torch.float32, device=rows.device)
    launch(
        largest_kernel, (triton.cdiv(size, LARGEST_LENGTH), clients),
        rows, bits, rows.stride(0), size,
        LENGTH=LARGEST_LENGTH, num_warps=8,
    )  # fmt: skip
    launch(
        convert_kernel, (triton.cdiv(size, CONVERT_LENGTH), clients),
        rows, bits, half, unit, rows.stride(0), size,
        TARGET=TARGET, MOST=LARGEST_EXPONENT, LENGTH=CONVERT_LENGTH, num_warps=8,
    )  # fmt: skip
    return half, unit


TILE = 64


@triton.jit
def transpose_kernel(x, y, A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr):
    """y[n, b, a] = x[n, a, b]."""
    across: tl.constexpr = (B + TILE - 1) // TILE
    start = tl.program_id(1).to(tl.int64) * (A * B)
    a = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    b = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    real = (a < A)[:, None] & (b < B)[None, :]
    block = tl.load(x + start + a[:, None] * B + b[None, :], mask=real)
    tl.store(y + start + b[:, None] * A + a[None, :], tl.trans(block), mask=tl.trans(real))


def transposed_matrices(x: Tensor) -> Tensor:
    """Return matrices [N, A, B] as [N, B, A], contiguous."""
    n, a, b = x.shape
    y = torch.empty((n, b, a), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(a, TILE) * triton.cdiv(b, TILE)
    launch(transpose_kernel, (tiles, n), x, y, A=a, B=b, TILE=TILE)
    return y
