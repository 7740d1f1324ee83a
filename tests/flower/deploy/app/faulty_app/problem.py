"""A problem with all that can go wrong on the wire: convolutions, BatchNorm, unequal clients."""

from __future__ import annotations

import torch
from torch import nn

import fedexp as fx

SEED = 3
LOCAL = fx.LocalTraining(lr=0.1, steps=4, batch_size=8, weight_decay=1e-3, clip_norm=5.0)


def problem(clients: int = 3) -> fx.tasks.Task:
    """Clients of different sizes, each with a slant on the labels; 20, 30, 40, ... examples."""
    sizes = torch.arange(clients) * 10 + 20
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(int(sizes.sum()), 1, 6, 6, generator=draw)
    true = torch.randn(36, 3, generator=draw)
    ids = torch.arange(clients).repeat_interleave(sizes)
    y = (x.flatten(1) @ true + 4 * nn.functional.one_hot(ids % 3, 3)).argmax(dim=1)
    train = fx.data.Federation.from_ids({"x": x, "y": y}, ids.tolist())
    return fx.tasks.classification("deployed", model, train, local=LOCAL)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
