"""Tilings of the Triton convolutions by name, and which are likely to be fast for given sizes."""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from fedexp.kernels import conv_triton
from fedexp.kernels.conv_triton import Tiling
from fedexp.kernels.geometry import Geometry

NAME = re.compile(r"(\d+)x(\d+)x(\d+)w(\d+)s(\d+)(t?)(?:/(\d+))?")


def name_of(t: Tiling) -> str:
    """
    >>> name_of(Tiling(128, 64, 64, warps=4, stages=3, swap=True, split=4))
    '128x64x64w4s3t/4'
    """
    turned, parts = "t" if t.swap else "", f"/{t.split}" if t.split > 1 else ""
    return f"{t.rows}x{t.columns}x{t.depth}w{t.warps}s{t.stages}{turned}{parts}"


def tiling_named(name: str) -> Tiling:
    """
    >>> tiling_named("128x64x64w4s3t/4")
    Tiling(rows=128, columns=64, depth=64, warps=4, stages=3, swap=True, split=4)
    """
    found = NAME.fullmatch(name)
    assert found, name
    rows, columns, depth, warps, stages = (int(found[i]) for i in range(1, 6))
    return Tiling(rows, columns, depth, warps, stages, bool(found[6]), int(found[7] or 1))


def tiled_form(name: str, direction: str) -> partial[Tensor]:
    """The kernel of that direction, cut as the name says."""
    return partial(getattr(conv_triton, direction), tiling=tiling_named(name))


def likely_tilings(direction: str, g: Geometry, bytes_each: int) -> list[str]:
    """Two or three names, the likeliest first, from measurements on an H200."""
    if direction == "weight_gradient":
        found = _of_weights(g, bytes_each)
    elif direction == "forward":
        found = _of_images(g.outputs, g.channels, g, bytes_each)
    else:
        found = _of_images(g.channels, g.outputs, g, bytes_each)
    return list(dict.fromkeys(name_of(t) for t in found))


def _of_images(columns: int, depth: int, g: Geometry, bytes_each: int) -> list[Tiling]:
    """Tiles of pixels x channels; 128 bytes of the sum at a time."""
    deep = _between(16, depth, 128 // bytes_each)
    wide = _between(16, columns, 256)
    if wide <= 64:
        return [Tiling(128, wide, deep, 4, 3), Tiling(128, wide, deep, 4, 4, swap=wide == 64)]
    if wide == 128:
        return [Tiling(128, 128, deep, 4, 3), Tiling(128, 128, deep, 8, 3)]
    few = g.out_height * g.out_width * g.batch <= 1024  # then large tiles leave cores idle
    small, large = Tiling(64, 256, deep, 4, 4), Tiling(128, 256, deep, 8, 3)
    return [small, large] if few else [large, small]


def _of_weights(g: Geometry, bytes_each: int) -> list[Tiling]:
    """Tiles of outputs x channels; `swap` here does three taps at a time."""
    deep, rows = 128 // bytes_each, _between(16, g.outputs, 128)
    narrow, three = _between(16, g.channels, 64), g.kernel_width == 3
    tiles = -(-g.outputs // rows) * -(-g.channels // narrow) * g.kernel_height * g.clients
    tiles *= 1 if three else g.kernel_width
    split = next((s for s in (1, 2, 4, 8) if tiles * s >= 240), 16)
    found = [Tiling(rows, narrow, deep, 4, 3 if three else 4, three, split)]
    if g.channels >= 128:
        return [*found, Tiling(rows, 128, deep, 8, 3)]
    return [*found, Tiling(rows, narrow, deep, 4, 3 if three else 4, three, 2 * split)]


def _between(least: int, size: int, most: int) -> int:
    """The power of two that covers `size`, within the bounds."""
    return max(least, min(most, 1 << (size - 1).bit_length()))
