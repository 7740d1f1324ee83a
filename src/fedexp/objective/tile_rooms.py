"""Winograd's transforms for 3x3 convolutions, and the memory in which tiles are computed.

Sixteen outputs of a convolution, 4x4, depend on 6x6 inputs. Read as a product of polynomials, taken
at 36 points, they cost 36 multiplications for each pair of channels instead of 144 (Winograd 1980;
Lavin and Gray 2016). The points are those of 0, 1, -1, 2, -2 and infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

INPUTS = (  # rows: points; columns: the six inputs of a line
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
TAPS = (  # rows: points; columns: the three weights of a line
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
OUTPUTS = (  # rows: the four outputs of a line; columns: points
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)
SUM = 7  # of the 36 points the one where errors of outputs are simply added up: (1, 1)


class Transforms(NamedTuple):
    """Of squares, as matrices: one product with all tiles is as quick as a copy of them."""

    inputs: Tensor  # [36, 36]
    taps: Tensor  # [36, 9]
    outputs: Tensor  # [16, 36]


@cache
def transforms(dtype: torch.dtype) -> Transforms:
    """
    >>> [tuple(matrix.shape) for matrix in transforms(torch.float32)]
    [(36, 36), (36, 9), (16, 36)]
    """
    lines = (torch.tensor(rows, dtype=torch.float64) for rows in (INPUTS, TAPS, OUTPUTS))
    return Transforms(*(torch.kron(line, line).to(dtype) for line in lines))


@dataclass(frozen=True)
class Grid:
    """The tiles of some images, and the channels before, between and after two convolutions.

    >>> Grid(5, 6, 6, (1, 32, 64), torch.float32).tiles
    180
    """

    images: int
    rows: int
    columns: int
    channels: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def tiles(self) -> int:
        return self.images * self.rows * self.columns

    @property
    def places(self) -> tuple[int, int, int]:
        return self.images, self.rows, self.columns

    def patches(self, x: Tensor) -> Tensor:
        """A view [K, 3, 3, 6, 6, images, rows, columns] of images [images, K, H, W]."""
        image, plane, line, point = x.stride()
        shape = (x.shape[1], 3, 3, 6, 6, *self.places)
        return x.as_strided(shape, (plane, line, point, line, point, image, 4 * line, 4 * point))

    def windows(self, pooled: Tensor) -> Tensor:
        """A view [2, 2, images, rows, columns, O] of maxima [images, O, 2 rows, 2 columns]."""
        image, plane, line, point = pooled.stride()
        shape = (2, 2, *self.places, pooled.shape[1])
        return pooled.as_strided(shape, (line, point, image, 2 * line, 2 * point, plane))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)


class Kept(NamedTuple):
    """What the way back needs of one block of images. Views are made once, as they take time."""

    patches: Tensor  # [9 K + 1, 36 tiles], the last row 1 for biases
    patches_turned: Tensor
    places: Tensor  # where patches go
    hidden: Tensor  # [36, tiles C]
    hidden_rows: Tensor
    spectra: Tensor  # [36, tiles, C]
    spectrum_lines: Tensor
    chosen: Tensor  # [2, 2, 2, 2, tiles O]
    chosen_lines: Tensor
    quarters: list[Tensor]  # the four outputs of every window, in torch's order

    @classmethod
    def room(cls, grid: Grid) -> Kept:
        before, between, after = grid.channels
        patches = torch.ones(9 * before + 1, 36 * grid.tiles, dtype=grid.dtype)
        places = patches[:-1].view(before, 3, 3, 6, 6, *grid.places)
        hidden = grid.empty(36, grid.tiles * between)
        spectra = grid.empty(36, grid.tiles, between)
        chosen = grid.empty(2, 2, 2, 2, grid.tiles * after)
        quarters = [chosen[:, i, :, j] for i in (0, 1) for j in (0, 1)]
        return cls(
            patches, patches.t(), places, hidden, hidden.view(-1, between),
            spectra, spectra.view(36, -1), chosen, chosen.view(16, -1), quarters,
        )  # fmt: skip


class Scratch(NamedTuple):
    """What blocks use one after another, so that it stays in the cache."""

    products: Tensor  # [36, tiles, O]
    product_lines: Tensor
    products_turned: Tensor
    sums: Tensor
    spectra: Tensor  # [36, tiles, C]
    spectrum_lines: Tensor
    hidden: Tensor  # [36, tiles C]
    hidden_rows: Tensor
    outputs: Tensor  # [2, 2, 2, 2, tiles O]
    output_lines: Tensor
    pooled: Tensor  # [2, 2, tiles O]
    spread: Tensor
    places: Tensor  # [2, 2, images, rows, columns, O]
    taken: Tensor  # [2, 2, tiles O]

    @classmethod
    def room(cls, grid: Grid) -> Scratch:
        _, between, after = grid.channels
        products = grid.empty(36, grid.tiles, after)
        spectra = grid.empty(36, grid.tiles, between)
        hidden = grid.empty(36, grid.tiles * between)
        outputs = grid.empty(2, 2, 2, 2, grid.tiles * after)
        pooled = grid.empty(2, 2, grid.tiles * after)
        return cls(
            products, products.view(36, -1), products.transpose(1, 2), products[SUM],
            spectra, spectra.view(36, -1), hidden, hidden.view(-1, between),
            outputs, outputs.view(16, -1), pooled, pooled[:, None, :, None],
            pooled.view(2, 2, *grid.places, after), torch.empty_like(pooled),
        )  # fmt: skip


class Block(NamedTuple):
    grid: Grid
    kept: Kept
    scratch: Scratch


class Rooms:
    """Memory for the blocks of a batch, which the next batch uses again: new memory is slow."""

    def __init__(self) -> None:
        self._blocks: dict[Grid, list[Block]] = {}

    def blocks(self, grid: Grid, count: int) -> list[Block]:
        mine = self._blocks.setdefault(grid, [])
        while len(mine) < count:
            scratch = mine[0].scratch if mine else Scratch.room(grid)
            mine.append(Block(grid, Kept.room(grid), scratch))
        return mine[:count]
