"""Convolutions of many clients at once, each with weights of its own, by Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fedexp.kernels.conv_kernels import (
    forward_kernel,
    input_gradient_kernel,
    weight_gradient_kernel,
)
from fedexp.kernels.geometry import Geometry
from fedexp.kernels.launch import launch, new_images
from fedexp.kernels.scaled import Units, result_type


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its product: `rows` x `columns` of the result, `depth` of the sum a time.

    `swap` lets channels be the rows of the tensor cores' product, which suits few channels;
    `split` cuts the sum over pixels of a weight gradient into so many parts.
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
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW]."""
    shape = (g.clients * g.batch, g.outputs, g.out_height, g.out_width)
    y = new_images(shape, x, result_type(x, units))
    tiles = triton.cdiv(g.batch * g.out_height * g.out_width, tiling.rows)
    grid = (tiles * triton.cdiv(g.outputs, tiling.columns), g.clients)
    launch(
        forward_kernel,
        grid,
        x,
        w,
        y,
        *(units or (x, w)),
        w.stride(0),
        g.batch,
        **sizes(g),
        **_cut(tiling),
        SWAP=tiling.swap,
        SCALED=units is not None,
    )
    return y


def input_gradient(
    dy: Tensor, w: Tensor, g: Geometry, *, tiling: Tiling, units: Units | None = None
) -> Tensor:
    """The gradient with respect to the images."""
    shape = (g.clients * g.batch, g.channels, g.height, g.width)
    dx = new_images(shape, dy, result_type(dy, units))
    s = g.stride
    tiles = triton.cdiv(g.batch * -(-g.height // s) * -(-g.width // s), tiling.rows)
    grid = (tiles * triton.cdiv(g.channels, tiling.columns), g.clients, s * s)
    launch(
        input_gradient_kernel,
        grid,
        dy,
        w,
        dx,
        *(units or (dy, w)),
        w.stride(0),
        g.batch,
        **sizes(g),
        **_cut(tiling),
        SWAP=tiling.swap,
        SCALED=units is not None,
    )
    return dx


def weight_gradient(
    dy: Tensor, x: Tensor, g: Geometry, *, tiling: Tiling, room: Tensor | None = None,
    units: Units | None = None,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the weights, [K, O, C, KH, KW], in its room if there is one."""
    taps = 3 if tiling.swap and g.kernel_width == 3 else 1
    window = (g.kernel_height, g.kernel_width)
    kind = result_type(x, units)
    dw = parts_of_gradient(x, g, tiling.split, room, kind)
    pixels = g.batch * g.out_height * g.out_width
    part = triton.cdiv(triton.cdiv(pixels, tiling.split), tiling.depth) * tiling.depth
    tiles = triton.cdiv(g.outputs, tiling.rows) * triton.cdiv(g.channels, tiling.columns)
    grid = (tiles * window[0] * window[1] // taps, g.clients, tiling.split)
    launch(
        weight_gradient_kernel,
        grid,
        dy,
        x,
        dw,
        *(units or (dy, x)),
        part,
        g.batch,
        **sizes(g),
        **_cut(tiling),
        TAPS=taps,
        SCALED=units is not None,
    )
    return joined_parts(dw, room, kind)


def parts_of_gradient(
    x: Tensor, g: Geometry, parts: int, room: Tensor | None, kind: torch.dtype
) -> Tensor:
    """Memory [parts, K, O, KH, KW, C] for sums over parts of the pixels: if one, for the result."""
    shape = (g.clients, g.outputs, g.kernel_height, g.kernel_width, g.channels)
    if parts > 1:
        return torch.empty((parts, *shape), dtype=torch.float32, device=x.device)
    if room is not None and room.dtype == kind:
        return room.movedim(2, -1)[None]
    return torch.empty((1, *shape), dtype=kind, device=x.device)


def joined_parts(parts: Tensor, room: Tensor | None, kind: torch.dtype) -> Tensor:
    """The sum of the parts, as [K, O, C, KH, KW]."""
    if len(parts) == 1:
        total = parts[0]
    elif room is None:
        total = parts.sum(dim=0).to(kind)
    else:
        total = room.movedim(2, -1).copy_(parts.sum(dim=0))
    return total.permute(0, 1, 4, 2, 3)


def sizes(g: Geometry) -> dict[str, int]:
    """The sizes as the kernels name them."""
    return {
        "C": g.channels, "H": g.height, "W": g.width,
        "OC": g.outputs, "OH": g.out_height, "OW": g.out_width,
        "KH": g.kernel_height, "KW": g.kernel_width, "S": g.stride, "P": g.padding,
    }  # fmt: skip


def _cut(tiling: Tiling) -> dict[str, Any]:
    return {
        "BM": tiling.rows, "BN": tiling.columns, "BK": tiling.depth,
        "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip
