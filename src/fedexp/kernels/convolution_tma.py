"""Triton convolutions on Hopper GPUs, whose operands the tensor memory accelerator (TMA) fetches.

One TMA instruction fetches a box of images x rows x pixels x channels, shifted by the tap, with
zeros outside the image and outside the client's images; so no thread computes addresses and no load
is masked. The channels of the result are the rows of the tensor-core product: an operand that is
reshaped must be the second one, or it would pass through registers.

A `Box` sets how a kernel splits its product. Boxes have names, under which the measured choice is
stored (`convolution`); `likely_boxes` has the candidates for given sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.convolution_torch import Geometry, Units, result_type
from fedexp.kernels.convolution_triton import (
    partial_sums,
    settings_named,
    store_taps,
    sum_of_parts,
    unscaled,
)
from fedexp.kernels.launch import launch, new_images


@triton.jit
def boxed_kernel(
    x, w, y, unit_x, unit_w,
    C: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, P: tl.constexpr,
    NI: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[pixel, n] = sum over taps and c of x[pixel shifted by the tap, c] w[n, tap, c].

    With BACK, w is [c, taps, n] with its taps in reverse order: the gradient of the images.
    """
    client = tl.program_id(1)
    across: tl.constexpr = OC // BN
    right: tl.constexpr = (OW + NW - 1) // NW
    down: tl.constexpr = (OH + NH - 1) // NH
    box = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * BN
    left, top = (box % right) * NW, (box // right % down) * NH
    image = box // (right * down) * NI
    depth: tl.constexpr = C // BK
    acc = tl.zeros((BN, NI * NH * NW), dtype=tl.float32)
    for step in range(KH * KW * depth):
        tap, c = step // depth, (step % depth) * BK
        seen = x.load([client, image, top + tap // KW - P, left + tap % KW - P, c])
        if BACK:
            weights = w.load([client * C + c, (KH * KW - 1 - tap) * OC + n]).T
        else:
            weights = w.load([client * OC + n, tap * C + c])
        acc = tl.dot(weights, seen.reshape(NI * NH * NW, BK).T, acc)
    acc = unscaled(acc, unit_x, unit_w, client, SCALED)
    y.store([client, image, top, left, n], acc.T.to(y.dtype).reshape(1, NI, NH, NW, BN))


@triton.jit
def _add_taps(
    a, x, client, image, row, column, c, one, two, three,
    PIXELS: tl.constexpr, BN: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Add the products of one box: of the tap at (row, column), and of the next two."""
    b = x.load([client, image, row, column, c]).reshape(PIXELS, BN)
    one = tl.dot(a, b, one)
    if TAPS == 3:
        b = x.load([client, image, row, column + 1, c]).reshape(PIXELS, BN)
        two = tl.dot(a, b, two)
        b = x.load([client, image, row, column + 2, c]).reshape(PIXELS, BN)
        three = tl.dot(a, b, three)
    return one, two, three


@triton.jit
def boxed_weight_gradient_kernel(
    dy, dy_rows, x, dw, unit_dy, unit_x, part, B,
    C: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, P: tl.constexpr,
    NI: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TAPS: tl.constexpr, FLAT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, c] = sum over pixels of dy[pixel, o] x[pixel shifted by the tap, c].

    FLAT: boxes are contiguous in memory, so dy is fetched as rows of pixels, except where a box
    reaches beyond the client's images: values there may be NaN, and zero times NaN is NaN.
    TAPS: one tap, or a row of three, per program. Axis 2 of the grid splits the boxes into parts.
    """
    client = tl.program_id(1)
    across: tl.constexpr = C // BN
    tiles: tl.constexpr = across * (OC // BM)
    right: tl.constexpr = (OW + NW - 1) // NW
    down: tl.constexpr = (OH + NH - 1) // NH
    PIXELS: tl.constexpr = NI * NH * NW
    tile, tap = tl.program_id(0) % tiles, tl.program_id(0) // tiles * TAPS
    o, c = (tile // across) * BM, (tile % across) * BN
    one = tl.zeros((BM, BN), dtype=tl.float32)
    two, three = one, one
    begin = tl.program_id(2) * part
    end = min(begin + part, (B + NI - 1) // NI * (right * down))
    inside = min(end, B // NI * (right * down)) if FLAT else end
    for box in range(begin, inside):
        left, top = (box % right) * NW, (box // right % down) * NH
        image = box // (right * down) * NI
        h, v = top + tap // KW - P, left + tap % KW - P
        if FLAT:
            a = dy_rows.load([((client * B + image) * OH + top) * OW, o]).T
        else:
            a = dy.load([client, image, top, left, o]).reshape(PIXELS, BM).T
        one, two, three = _add_taps(a, x, client, image, h, v, c, one, two, three, PIXELS, BN, TAPS)
    if FLAT:
        for box in range(max(begin, inside), end):
            top, image = (box % down) * NH, box // down * NI
            h, v = top + tap // KW - P, tap % KW - P
            a = dy.load([client, image, top, 0, o]).reshape(PIXELS, BM).T
            one, two, three = _add_taps(
                a, x, client, image, h, v, c, one, two, three, PIXELS, BN, TAPS
            )
    rows, columns = o + tl.arange(0, BM), c + tl.arange(0, BN)
    dw += (tl.program_id(2) * tl.num_programs(1) + client).to(tl.int64) * (OC * KH * KW * C)
    at = (rows[:, None] * (KH * KW) + tap) * C + columns[None, :]
    store_taps(dw + at, None, one, two, three, unit_dy, unit_x, client, C, TAPS, SCALED)


@dataclass(frozen=True)
class Box:
    """How a kernel splits its product: pixels in boxes of `images` x `rows` x `width`.

    Attributes:
        channels: channels of the result per program; outputs, for a weight gradient.
        depth: terms of the sum per iteration; inputs, for a weight gradient.
        warps: warps per program.
        stages: stages of the software pipeline.
        three: compute the three taps of a row in one program, for a weight gradient.
        split: parts of the sum over pixels, for a weight gradient.
    """

    images: int
    rows: int
    width: int
    channels: int
    depth: int
    warps: int
    stages: int
    three: bool = False
    split: int = 1

    @property
    def pixels(self) -> tuple[int, int, int]:
        return self.images, self.rows, self.width

    def count(self, g: Geometry) -> int:
        """Return the number of boxes that cover the outputs of a client."""
        sizes = (g.batch, g.out_height, g.out_width)
        images, rows, columns = (triton.cdiv(a, b) for a, b in zip(sizes, self.pixels, strict=True))
        return images * rows * columns


@cache
def has_boxes() -> bool:
    """Return whether this GPU and this Triton have TMA."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def forward(
    x: Tensor, w: Tensor, g: Geometry, *, box: Box, units: Units | None = None, back: bool = False
) -> Tensor:
    """Return the stride-1 convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW].

    With `back`, weights are transposed and their taps in reverse order.
    """
    shape = (g.clients * g.batch, g.outputs, g.out_height, g.out_width)
    y = new_images(shape, x, result_type(x, units))
    grid = (box.count(g) * (g.outputs // box.channels), g.clients)
    block = [box.depth, box.channels] if back else [box.channels, box.depth]
    launch(
        boxed_kernel,
        grid,
        _images(x, g.clients, (*box.pixels, box.depth)),
        _matrix(_rows(w), block),
        _images(y, g.clients, (*box.pixels, box.channels)),
        *(units or (x, w)),
        **_sizes(g, box),
        BN=box.channels,
        BK=box.depth,
        BACK=back,
        SCALED=units is not None,
    )
    return y


def input_gradient(
    dy: Tensor, w: Tensor, g: Geometry, *, box: Box, units: Units | None = None
) -> Tensor:
    """Return the gradient with respect to the images: a transposed convolution."""
    return forward(dy, w, g.transposed, box=box, units=units, back=True)


def weight_gradient(
    dy: Tensor, x: Tensor, g: Geometry, *, box: Box, buffer: Tensor | None = None,
    units: Units | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to the weights, [K, O, C, KH, KW], in `buffer` if given."""
    dtype = result_type(x, units)
    dw = partial_sums(x, g, box.split, buffer, dtype)
    taps = 3 if box.three else 1
    tiles = (g.outputs // box.channels) * (g.channels // box.depth)
    grid = (tiles * g.kernel_height * g.kernel_width // taps, g.clients, box.split)
    pixels = box.images * box.rows * box.width
    launch(
        boxed_weight_gradient_kernel,
        grid,
        _images(dy, g.clients, (*box.pixels, box.channels)),
        _matrix(dy.permute(0, 2, 3, 1).reshape(-1, g.outputs), [pixels, box.channels]),
        _images(x, g.clients, (*box.pixels, box.depth)),
        dw,
        *(units or (dy, x)),
        triton.cdiv(box.count(g), box.split),
        g.batch,
        **_sizes(g, box),
        BM=box.channels,
        BN=box.depth,
        TAPS=taps,
        FLAT=_is_contiguous(g, box),
        SCALED=units is not None,
    )
    return sum_of_parts(dw, buffer, dtype)


def _is_contiguous(g: Geometry, box: Box) -> bool:
    """Return whether a box is contiguous: whole rows, and all of them if several images."""
    rows = box.width == g.out_width and g.out_height % box.rows == 0
    return rows and (box.images == 1 or box.rows == g.out_height)


def _rows(w: Tensor) -> Tensor:
    """Return weights as a matrix with one row per client and output, copied if not contiguous."""
    return w.permute(0, 1, 3, 4, 2).reshape(w.shape[0] * w.shape[1], -1)


def _matrix(matrix: Tensor, block: list[int]) -> Any:
    """Return a descriptor of a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix.contiguous(), block)


def _images(x: Tensor, clients: int, block: tuple[int, ...]) -> Any:
    """Return a descriptor of images [K * B, C, H, W] as [K, B, H, W, C]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    last = x.permute(0, 2, 3, 1).unflatten(0, (clients, -1))
    return TensorDescriptor.from_tensor(last, [1, *block])


def _sizes(g: Geometry, box: Box) -> dict[str, int]:
    return {
        "C": g.channels, "OC": g.outputs, "OH": g.out_height, "OW": g.out_width,
        "KH": g.kernel_height, "KW": g.kernel_width, "P": g.padding,
        "NI": box.images, "NH": box.rows, "NW": box.width,
        "num_warps": box.warps, "num_stages": box.stages,
    }  # fmt: skip


ENOUGH = 240  # programs that keep every core of a large GPU busy


def name_of(b: Box) -> str:
    """Return the name of a box.

    >>> name_of(Box(1, 4, 32, channels=64, depth=64, warps=4, stages=3, three=True, split=2))
    'box 1x4x32 64x64w4s3t/2'
    """
    three, parts = "t" if b.three else "", f"/{b.split}" if b.split > 1 else ""
    pixels = "x".join(str(size) for size in b.pixels)
    return f"box {pixels} {b.channels}x{b.depth}w{b.warps}s{b.stages}{three}{parts}"


def box_named(name: str) -> Box:
    """Return the box of a name.

    >>> box_named("box 1x4x32 64x64w4s3t/2").pixels
    (1, 4, 32)
    """
    return Box(*settings_named(name))


def likely_boxes(direction: str, g: Geometry, bytes_each: int) -> list[str]:
    """Return at most two names, the likeliest first, from measurements on an H200."""
    if g.stride != 1 or not has_boxes() or 2 * g.padding + 1 != g.kernel_width:
        return []
    if g.kernel_height != g.kernel_width or (g.channels % 64 or g.outputs % 64):
        return []
    if bytes_each == 4 and direction != "forward":
        return []  # tensor cores take float32 operands in one memory order only, not in this one
    if direction == "weight_gradient":
        found = _weight_boxes(g)
    else:
        wide = g.channels if direction == "input_gradient" else g.outputs
        found = [_box(g, *sizes) for sizes in _image_boxes(wide, g, 128 // bytes_each)]
    return [name_of(box) for box in found if box is not None]


def _image_boxes(wide: int, g: Geometry, depth: int) -> list[tuple[int, int, int, int, int]]:
    """Return pixels, channels, depth, warps and stages of the candidates."""
    if wide % 128:
        return [(128, 64, depth, 4, 3), (128, 64, depth, 4, 4)]
    if wide % 256:
        return [(128, 128, depth, 4, 3), (256, 128, depth, 8, 4)]
    if g.out_height * g.out_width <= 32:  # larger boxes would reach beyond the client's images
        return [(64, 256, depth, 4, 4), (64, 256, depth, 8, 4)]
    return [(128, 256, depth, 8, 4), (256, 128, depth, 8, 4)]


def _weight_boxes(g: Geometry) -> list[Box | None]:
    taps = g.kernel_height * g.kernel_width
    row = g.kernel_width == 3
    if g.outputs % 128 or g.channels % 64:
        cuts = [(128, 64, 64, 4, 3, row), (64, 64, 64, 4, 4, False)]
    elif g.channels % 128:
        cuts = [(64, 128, 64, 4, 4, row), (64, 128, 64, 4, 3, False)]
    elif g.channels % 256:
        cuts = [(64, 64, 128, 4, 3, row), (64, 128, 64, 4, 4, row)]
    else:
        cuts = [(64, 128, 128, 4, 3, False), (32, 128, 128, 4, 4, False)]
    found = []
    for pixels, outputs, inputs, warps, stages, three in cuts:
        tiles = (g.outputs // outputs) * (g.channels // inputs) * g.clients
        tiles *= taps // 3 if three else taps
        split = next((s for s in (1, 2, 4, 8) if tiles * s * (3 if three else 1) >= ENOUGH), 16)
        found.append(_box(g, pixels, outputs, inputs, warps, stages, three, split))
    return found


def _box(
    g: Geometry, pixels: int, channels: int, depth: int, warps: int, stages: int,
    three: bool = False, split: int = 1,
) -> Box | None:  # fmt: skip
    """Return a box of rows of an image, or of whole images; None where these do not fit."""
    height, width = g.out_height, g.out_width
    if width & (width - 1) or height & (height - 1) or width > pixels:
        return None
    rows = min(height, pixels // width)
    images = pixels // (rows * width)
    return Box(images, rows, width, channels, depth, warps, stages, three, split)
