"""Boxes of the convolutions by name, and which are likely to be fast for given sizes."""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from fedexp.kernels import conv_tma
from fedexp.kernels.conv_tma import Box
from fedexp.kernels.geometry import Geometry

NAME = re.compile(r"box (\d+)x(\d+)x(\d+) (\d+)x(\d+)w(\d+)s(\d+)(t?)(?:/(\d+))?")
ENOUGH = 240  # programs, to give every core of a large GPU something to do


def name_of(b: Box) -> str:
    """
    >>> name_of(Box(1, 4, 32, channels=64, depth=64, warps=4, stages=3, three=True, split=2))
    'box 1x4x32 64x64w4s3t/2'
    """
    three, parts = "t" if b.three else "", f"/{b.split}" if b.split > 1 else ""
    pixels = "x".join(str(size) for size in b.pixels)
    return f"box {pixels} {b.channels}x{b.depth}w{b.warps}s{b.stages}{three}{parts}"


def box_named(name: str) -> Box:
    """
    >>> box_named("box 1x4x32 64x64w4s3t/2").pixels
    (1, 4, 32)
    """
    found = NAME.fullmatch(name)
    assert found, name
    images, rows, width, channels, depth, warps, stages = (int(found[i]) for i in range(1, 8))
    three, split = bool(found[8]), int(found[9] or 1)
    return Box(images, rows, width, channels, depth, warps, stages, three, split)


def boxed_form(name: str, direction: str) -> partial[Tensor]:
    """The kernel of that direction, cut as the name says."""
    return partial(getattr(conv_tma, direction), box=box_named(name))


def likely_boxes(direction: str, g: Geometry, bytes_each: int) -> list[str]:
    """Up to two names, the likeliest first, from measurements on an H200; none if none fits."""
    back = direction == "input_gradient"
    if g.stride != 1 or not conv_tma.has_boxes() or 2 * g.padding + 1 != g.kernel_width:
        return []
    if g.kernel_height != g.kernel_width or (g.channels % 64 or g.outputs % 64):
        return []
    if bytes_each == 4 and direction != "forward":
        return []  # tensor cores want such operands in an order that they do not lie in
    if direction == "weight_gradient":
        found = _of_weights(g)
    else:
        wide = g.channels if back else g.outputs
        found = [_pixels(g, *cut) for cut in _of_images(wide, g, 128 // bytes_each)]
    return [name_of(box) for box in found if box is not None]


def _of_images(wide: int, g: Geometry, depth: int) -> list[tuple[int, int, int, int, int]]:
    """Pixels, channels, depth, warps, stages."""
    if wide % 128:
        return [(128, 64, depth, 4, 3), (128, 64, depth, 4, 4)]
    if wide % 256:
        return [(128, 128, depth, 4, 3), (256, 128, depth, 8, 4)]
    if g.out_height * g.out_width <= 32:  # larger boxes would reach beyond the client's images
        return [(64, 256, depth, 4, 4), (64, 256, depth, 8, 4)]
    return [(128, 256, depth, 8, 4), (256, 128, depth, 8, 4)]


def _of_weights(g: Geometry) -> list[Box | None]:
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
        found.append(_pixels(g, pixels, outputs, inputs, warps, stages, three, split))
    return found


def _pixels(
    g: Geometry, pixels: int, channels: int, depth: int, warps: int, stages: int,
    three: bool = False, split: int = 1,
) -> Box | None:  # fmt: skip
    """A box of so many pixels: rows of an image, or whole images; None where these do not fit."""
    height, width = g.out_height, g.out_width
    if width & (width - 1) or height & (height - 1) or width > pixels:
        return None
    rows = min(height, pixels // width)
    images = pixels // (rows * width)
    return Box(images, rows, width, channels, depth, warps, stages, three, split)
