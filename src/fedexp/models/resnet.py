"""ResNet-18 for images of 32x32 pixels, with group instead of batch normalisation.

Batch statistics of clients with different data do not average to anything useful, so federated
work replaces them (Hsieh et al., 2020); the authors use GroupNorm with 2 groups (audit B14).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from fedexp.errors import require
from fedexp.models.norm import GroupNormReLU

Pool = Literal["adaptive", "avg3"]
WIDTHS = (64, 128, 256, 512)


def resnet18(classes: int = 10, pool: Pool = "adaptive", groups: int = 2) -> nn.Sequential:
    """ResNet-18 (He et al., 2016) in the form for small images [N, 3, 32, 32].

    It begins with a 3x3 convolution and no pooling; four pairs of residual blocks follow, the
    last three pairs halving the resolution, down to 4x4. It has 11,173,962 parameters at 10
    classes.

    Args:
        classes: number of outputs.
        pool: "adaptive" averages the whole 4x4 map. "avg3" averages 3x3 windows, of which one
            fits: the last row and column are ignored, as in the authors' code (audit B14).
        groups: groups of each GroupNorm; a divisor of 64.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    require(pool in get_args(Pool), f"pool must be one of {', '.join(get_args(Pool))}: {pool!r}")
    require(
        groups >= 1 and WIDTHS[0] % groups == 0,
        f"groups must divide the {WIDTHS[0]} channels of the first layer, but is {groups}",
    )
    blocks, channels = [], WIDTHS[0]
    for width in WIDTHS:
        blocks += [Residual(channels, width, groups), Residual(width, width, groups)]
        channels = width
    return nn.Sequential(
        _convolution(3, WIDTHS[0]),
        GroupNormReLU(groups, WIDTHS[0]),
        *blocks,
        nn.AdaptiveAvgPool2d(1) if pool == "adaptive" else nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut: relu(f(x) + shortcut(x)).

    Where the number of channels changes, the block also halves the resolution, and its shortcut
    is a 1x1 convolution; else the shortcut is x itself.

    >>> import torch
    >>> Residual(4, 8, groups=2)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.body = nn.Sequential(
            _convolution(channels, width, stride),
            GroupNormReLU(groups, width),
            _convolution(width, width),
        )
        self.join = GroupNormReLU(groups, width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False),
                nn.GroupNorm(groups, width),
            )

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.join(self.body(x), self.shortcut(x))
        return joined


def _convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution; it has no bias, because the normalisation after it has one."""
    return nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
