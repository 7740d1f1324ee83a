"""A study file of a user's own, written into the folder of a test."""

from __future__ import annotations

from pathlib import Path

TEXT = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import fedexp as fx

rng = np.random.default_rng(0)
x = rng.normal(size=(200, 6)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
train = fx.Federation.from_ids({"x": x[:160], "y": y[:160]}, np.arange(160) % 8)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


def make(width: int = 4, seed: int = 0):
    return fx.classification(
        "mine", lambda: Net(width), train, {"x": torch.tensor(x[160:]), "y": torch.tensor(y[160:])},
        local=fx.LocalTraining(lr=0.1, steps=2, batch_size=8), rounds=4, cohort=3,
        tuned={"fedexp": {"server.eps": 0.01, "local.lr": 0.2}},
    )


task = make()


@dataclass(frozen=True)
class SignAverage(fx.ServerRule):
    """Move by the sign of the mean update."""

    lr: float = 0.01

    def step(self, params, aggregate, state):
        return params - self.lr * aggregate.mean.sign(), state, {"server_lr": torch.tensor(self.lr)}


@dataclass(frozen=True)
class Shrunk(fx.SGD):
    """Shrink every gradient."""

    factor: float = 0.5

    def correct(self, grad, params, start, broadcast, client_state):
        return self.factor * grad


mine = fx.Algorithm("sign", client=Shrunk(), server=SignAverage())
'''


def write_study(folder: Path, more: str = "", name: str = "study.py") -> Path:
    """Write the file; return its path."""
    path = folder / name
    path.write_text(TEXT + more)
    return path
