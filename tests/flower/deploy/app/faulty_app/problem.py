"""A problem with all that can go wrong on the wire: convolutions, BatchNorm, unequal clients."""

from __future__ import annotations

import torch
from torch import nn

import fedexp as fx

CLIENTS, SIZES, SEED = 3, (20, 30, 40), 3
LOCAL = fx.LocalTraining(lr=0.1, steps=4, batch_size=8, weight_decay=1e-3, clip_norm=5.0)


def problem() -> fx.tasks.Task:
    """Three clients of different sizes, each with its own slant on the labels."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 1, 6, 6, generator=draw)
    true = torch.randn(36, 3, generator=draw)
    ids = torch.arange(CLIENTS).repeat_interleave(torch.tensor(SIZES))
    y = (x.flatten(1) @ true + 4 * nn.functional.one_hot(ids, 3)).argmax(dim=1)
    train = fx.data.Federation.from_ids({"x": x, "y": y}, ids.tolist())
    return fx.tasks.classification("deployed", model, train, local=LOCAL)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
