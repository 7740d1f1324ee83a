"""Convolutions of many clients whose operands are fetched in boxes, on Hopper GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from fedexp.kernels.conv_triton import joined_parts, parts_of_gradient
from fedexp.kernels.geometry import Geometry
from fedexp.kernels.launch import launch, new_images
from fedexp.kernels.scaled import Units, result_type
from fedexp.kernels.tma_kernels import boxed_kernel, boxed_weight_gradient_kernel


@dataclass(frozen=True)
class Box:
    """How a product is cut: pixels in boxes of `images` x `rows` x `width`, and channels.

    `channels` of the result and `depth` of the sum at a time; of a weight gradient, they are the
    outputs and the inputs of a tile, `three` taps share a program, and the sum over pixels is
    `split` into so many parts.
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
        """Boxes that cover the outputs of a client."""
        sizes = (g.batch, g.out_height, g.out_width)
        images, rows, columns = (triton.cdiv(a, b) for a, b in zip(sizes, self.pixels, strict=True))
        return images * rows * columns


@cache
def has_boxes() -> bool:
    """Whether this GPU and this Triton fetch boxes."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def forward(x: Tensor, w: Tensor, g: Geometry, *, box: Box, units: Units | None = None) -> Tensor:
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW], stride 1."""
    return _boxed(x, w, g, box, units, back=False)


def input_gradient(
    dy: Tensor, w: Tensor, g: Geometry, *, box: Box, units: Units | None = None
) -> Tensor:
    """The gradient with respect to the images: a convolution with the weights turned round."""
    return _boxed(dy, w, g.turned, box, units, back=True)


def _boxed(x: Tensor, w: Tensor, g: Geometry, box: Box, units: Units | None, back: bool) -> Tensor:
    shape = (g.clients * g.batch, g.outputs, g.out_height, g.out_width)
    y = new_images(shape, x, result_type(x, units))
    grid = (box.count(g) * (g.outputs // box.channels), g.clients)
    block = [box.depth, box.channels] if back else [box.channels, box.depth]
    launch(
        boxed_kernel,
        grid,
        _images(x, g.clients, (*box.pixels, box.depth)),
        _matrix(_joined(w), block),
        _images(y, g.clients, (*box.pixels, box.channels)),
        *(units or (x, w)),
        **_sizes(g, box),
        BN=box.channels,
        BK=box.depth,
        BACK=back,
        SCALED=units is not None,
    )
    return y


def weight_gradient(
    dy: Tensor, x: Tensor, g: Geometry, *, box: Box, room: Tensor | None = None,
    units: Units | None = None,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the weights, [K, O, C, KH, KW], in its room if there is one."""
    kind = result_type(x, units)
    dw = parts_of_gradient(x, g, box.split, room, kind)
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
        FLAT=_is_stretch(g, box),
        SCALED=units is not None,
    )
    return joined_parts(dw, room, kind)


def _is_stretch(g: Geometry, box: Box) -> bool:
    """Whether a box is one stretch of memory: whole rows, and all of them if several images."""
    rows = box.width == g.out_width and g.out_height % box.rows == 0
    return rows and (box.images == 1 or box.rows == g.out_height)


def _joined(w: Tensor) -> Tensor:
    """Weights as a matrix with a row for each client and output, copied where they lie apart."""
    return w.permute(0, 1, 3, 4, 2).reshape(w.shape[0] * w.shape[1], -1)


def _matrix(matrix: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix.contiguous(), block)


def _images(x: Tensor, clients: int, block: tuple[int, ...]) -> Any:
    """Images [K * B, C, H, W] as [K, B, H, W, C]."""
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
