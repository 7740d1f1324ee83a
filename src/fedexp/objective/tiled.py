"""Two 3x3 convolutions and a maximum at the start of a network, tile by tile.

Block by block of images everything happens in tiles of 6x6 hidden values: they are computed there,
so nothing is copied into tiles; maxima of 2x2 outputs are taken there; and as nobody asks for the
gradient of the images, errors of values that several tiles share need never be added up. The second
convolution is Winograd's, with a quarter of the multiplications (`tile_rooms`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedexp.objective.own_gradient import hooked
from fedexp.objective.tile_rooms import Block, Grid, Rooms, transforms
from fedexp.objective.tile_steps import back, forth, scripted

BLOCK = 5  # images; their products fill a core's cache
# Where it was measured to pay, by 1.0 to 2.0 times; outside, by 0.5 to 1.1.
LEAST_IMAGES = 4
LEAST_LENGTH = 20  # of images; smaller ones fill no block
LEAST_CHANNELS = 32  # between and after; with fewer, transforms take longer than what they save
MOST_COLOURS = 3  # hidden values are computed twice, which costs little with few channels before
KEPT_BYTES = 2**27  # on the way forth; an image of EMNIST's network keeps half a megabyte


def tile_front(module: nn.Module) -> None:
    """Let a sequence that starts with layers of that kind compute them in tiles."""
    if type(module) is not nn.Sequential or len(module) < 5:
        return
    layers = [module[k] for k in range(5)]
    if _suits(layers):
        first, _, second, relu, pool = layers
        module[0] = TiledFront(nn.Sequential(first, nn.ReLU(), second, pool, relu))
        for k in range(1, 5):
            module[k] = nn.Identity()


def _suits(layers: list[nn.Module]) -> bool:
    first, _, second, _, pool = layers
    kinds = [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    if [type(layer) for layer in layers] != kinds or any(hooked(layer) for layer in layers):
        return False
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    assert isinstance(pool, nn.MaxPool2d)
    return (
        _is_plain(first)
        and _is_plain(second)
        and first.bias is not second.bias
        and first.in_channels <= MOST_COLOURS
        and min(first.out_channels, second.out_channels) >= LEAST_CHANNELS
        and repr(pool) == repr(nn.MaxPool2d(2))
        and not pool.return_indices  # which its repr leaves out
    )


def _is_plain(layer: nn.Conv2d) -> bool:
    """Whether it is 3x3 without padding, stride, dilation or groups, and has both parameters."""
    plain = nn.Conv2d(layer.in_channels, layer.out_channels, 3, device="meta")
    return repr(layer) == repr(plain) and len(layer._parameters) == 2


class TiledFront(nn.Module):
    """Convolution, ReLU, convolution, maximum, ReLU.

    One thread at a time may use it, and a way back must follow its way forth: both share memory.

    Args:
        layers: the same, one after another, for inputs that do not suit.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.rooms = Rooms()
        for step in (forth, back):  # before there are threads: filters of warnings are theirs all
            scripted(step)

    def forward(self, x: Tensor) -> Tensor:
        weights = tuple(self.layers.parameters())  # of both, each weight before its bias
        if not _can(x, weights):
            out: Tensor = self.layers(x)
            return out
        tiled: Tensor = _Tiled.apply(x.contiguous(), *weights, self.rooms)  # type: ignore[no-untyped-call]
        return tiled


def _can(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """Whether the inputs suit: whole tiles, enough of them and not too many."""
    if x.ndim != 4 or x.requires_grad or torch.is_autocast_enabled("cpu"):
        return False
    before, between, after = x.shape[1], len(weights[0]), len(weights[2])
    numbers = 36 * (9 * before + 1 + 2 * between) + 16 * after  # that a tile keeps
    return (
        len(x) >= LEAST_IMAGES
        and all(length >= LEAST_LENGTH and length % 4 == 0 for length in x.shape[2:])
        and len(x) * (x[0, 0].numel() // 16) * numbers * x.element_size() <= KEPT_BYTES
        and x.dtype == weights[0].dtype
        and x.dtype in (torch.float32, torch.float64)
    )


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, rooms: Rooms
    ) -> Tensor:
        matrices = transforms(x.dtype)
        first = torch.cat([w1.reshape(len(w1), -1), b1[:, None]], dim=1).t()
        ctx.second = (matrices.taps @ w2.permute(2, 3, 0, 1).reshape(9, -1)).view(36, len(w2), -1)
        ctx.blocks = _blocks(x, (x.shape[1], len(w1), len(w2)), rooms)
        height, width = (length // 2 - 2 for length in x.shape[2:])
        out = x.new_empty(len(x), height, width, len(w2)).movedim(3, 1)  # channels last
        weights = first, ctx.second.transpose(1, 2).contiguous(), b2.detach()
        for block, images, pooled in zip(ctx.blocks, x.split(BLOCK), out.split(BLOCK), strict=True):
            views = block.grid.patches(images), block.grid.windows(pooled)
            pair = matrices.inputs, matrices.outputs
            scripted(forth)(views, block.kept, block.scratch, pair, weights)
        return out

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        matrices, (_, outputs, channels) = transforms(error.dtype), ctx.second.shape
        first = error.new_zeros(len(ctx.blocks[0].kept.patches), channels)
        second, bias = torch.zeros_like(ctx.second), error.new_zeros(outputs)
        pair, sums = (matrices.inputs, matrices.outputs), (first, second, bias)
        for block, errors in zip(ctx.blocks, error.split(BLOCK), strict=True):
            view = block.grid.windows(errors)
            scripted(back)(view, block.kept, block.scratch, pair, ctx.second, sums)
        taps = (matrices.taps.t() @ second.view(36, -1)).view(3, 3, outputs, channels)
        window = first[:-1].t().reshape(channels, -1, 3, 3)
        return None, window, first[-1], taps.permute(2, 3, 0, 1), bias, None


def _blocks(x: Tensor, channels: tuple[int, int, int], rooms: Rooms) -> list[Block]:
    """Room for all images: full blocks, and one for the rest."""
    rows, columns = (length // 4 - 1 for length in x.shape[2:])
    full, rest = divmod(len(x), BLOCK)
    blocks = rooms.blocks(Grid(BLOCK, rows, columns, channels, x.dtype), full) if full else []
    if rest:
        blocks = blocks + rooms.blocks(Grid(rest, rows, columns, channels, x.dtype), 1)
    return blocks
