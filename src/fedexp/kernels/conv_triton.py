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
from fedexp.kernels.launch import launch


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


def input_gradient(dy: Tensor, w: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The gradient with respect to the images."""
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
    )
    return dx


def flipped_input_gradient(dy: Tensor, w: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The same for a stride of 1, as a convolution with the weights turned round.

    That costs a copy of the weights, and lets wide types be read in the order tensor cores want.
    """
    turned = w.flip(-1, -2).permute(0, 2, 3, 4, 1).contiguous().movedim(-1, 2)
    window = (g.kernel_height, g.kernel_width)
    images = (g.outputs, g.out_height, g.out_width)
    back = Geometry(
        g.clients, g.batch, *images, g.channels, *window, 1, g.kernel_height - 1 - g.padding
    )
    return forward(dy, turned, back, tiling)


def weight_gradient(dy: Tensor, x: Tensor, g: Geometry, tiling: Tiling) -> Tensor:
    """The gradient with respect to the weights, [K, O, C, KH, KW]."""
    taps = 3 if tiling.swap and g.kernel_width == 3 else 1
    window = (g.kernel_height, g.kernel_width)
    shape = (tiling.split, g.clients, g.outputs, *window, g.channels)
    kind = x.dtype if tiling.split == 1 else torch.float32
    dw = torch.empty(shape, dtype=kind, device=x.device)
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
    total = dw[0] if tiling.split == 1 else dw.sum(dim=0).to(x.dtype)
    return total.permute(0, 1, 4, 2, 3)


def new_images(n: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """Room for images, channels last in memory."""
    shape = (n, channels, height, width)
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


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
