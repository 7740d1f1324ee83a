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
from fedexp.kernels.reorder import turned_weights


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


def forward(x: Tensor, w: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW]."""
    y = new_images(g.clients * g.batch, g.outputs, g.out_height, g.out_width, x)
    tiles = triton.cdiv(g.batch * g.out_height * g.out_width, tiling.rows)
    grid = (tiles * triton.cdiv(g.outputs, tiling.columns), g.clients)
    launch(
        forward_kernel,
        grid,
        x,
        w,
        y,
        w.stride(0),
        g.batch,
        **sizes(g),
        **_cut(tiling, x),
        SWAP=tiling.swap,
    )
    return y


def turned_input_gradient(dy: Tensor, w: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The gradient with respect to the images, with a copy of the weights that is turned round."""
    return input_gradient(dy, w, g, tiling, turned=True)


def input_gradient(
    dy: Tensor, w: Tensor, g: Geometry, tiling: Tiling, turned: bool = False
) -> Tensor:
    """The gradient with respect to the images."""
    w = turned_weights(w) if turned else w
    dx = new_images(g.clients * g.batch, g.channels, g.height, g.width, dy)
    s = g.stride
    tiles = triton.cdiv(g.batch * -(-g.height // s) * -(-g.width // s), tiling.rows)
    grid = (tiles * triton.cdiv(g.channels, tiling.columns), g.clients, s * s)
    launch(
        input_gradient_kernel,
        grid,
        dy,
        w,
        dx,
        w.stride(0),
        g.batch,
        **sizes(g),
        **_cut(tiling, dy),
        SWAP=tiling.swap,
        TURNED=turned,
    )
    return dx


def flipped_input_gradient(dy: Tensor, w: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The same for a stride of 1, as a convolution with the weights turned round.

    That costs a copy of the weights, and lets wide types be read in the order tensor cores want.
    """
    return forward(dy, turned_weights(w), g.turned, tiling)


def weight_gradient(
    dy: Tensor, x: Tensor, g: Geometry, room: Tensor | None = None, *, tiling: Tiling
) -> Tensor:
    """The gradient with respect to the weights, [K, O, C, KH, KW], in its room if there is one."""
    taps = 3 if tiling.swap and g.kernel_width == 3 else 1
    window = (g.kernel_height, g.kernel_width)
    dw = parts_of_gradient(x, g, tiling.split, room)
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
        part,
        g.batch,
        **sizes(g),
        **_cut(tiling, x),
        TAPS=taps,
    )
    return joined_parts(dw, x, room)


def parts_of_gradient(x: Tensor, g: Geometry, parts: int, room: Tensor | None) -> Tensor:
    """Memory [parts, K, O, KH, KW, C] for sums over parts of the pixels: if one, for the result."""
    shape = (g.clients, g.outputs, g.kernel_height, g.kernel_width, g.channels)
    if parts > 1:
        return torch.empty((parts, *shape), dtype=torch.float32, device=x.device)
    if room is not None and room.dtype == x.dtype:
        return room.movedim(2, -1)[None]
    return torch.empty((1, *shape), dtype=x.dtype, device=x.device)


def joined_parts(parts: Tensor, x: Tensor, room: Tensor | None) -> Tensor:
    """The sum of the parts, as [K, O, C, KH, KW]."""
    if len(parts) == 1:
        total = parts[0]
    elif room is None:
        total = parts.sum(dim=0).to(x.dtype)
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


def _cut(tiling: Tiling, like: Tensor) -> dict[str, Any]:
    return {
        "BM": tiling.rows, "BN": tiling.columns, "BK": tiling.depth,
        "num_warps": tiling.warps, "num_stages": tiling.stages,
        "PRECISION": "tf32",
    }  # fmt: skip
