"""The work of all contestants of `peers.py`, in numpy and torch alone; W3 by our ResNet-18.

Every contestant runs in a separate process and prints one line of JSON: the milliseconds of each
round, the first ones included, the versions of its packages and, of this package, the engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor, nn

LR = 0.1


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def pfl_cnn() -> nn.Module:
    """Return the network of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """Return the paper's network for CIFAR-10, as this package defines it: with GroupNorm."""
    from fedexp.models import resnet18

    return resnet18(10)


@dataclass(frozen=True)
class PeerWork:
    """Uniform FedAvg with plain SGD: `epochs` passes of batches over each of `cohort` clients."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    each: int
    cohort: int
    epochs: int
    batch: int

    def data(self) -> tuple[Tensor, Tensor]:
        """Return examples [clients, each, ...] and classes; values do not matter for time."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(self.clients, self.each, *self.shape, generator=draw)
        return x, torch.randint(10, (self.clients, self.each), generator=draw)


WORKS = {
    "W1": PeerWork(mlp, (64,), clients=100, each=100, cohort=20, epochs=10, batch=50),
    "W2": PeerWork(pfl_cnn, (3, 32, 32), clients=1000, each=50, cohort=50, epochs=1, batch=10),
    "W3": PeerWork(resnet18, (3, 32, 32), clients=100, each=500, cohort=20, epochs=2, batch=50),
}


@dataclass(frozen=True)
class Assignment:
    """The arguments of a contestant."""

    work: PeerWork
    rounds: int
    engine: str
    device: str


def assignment() -> Assignment:
    """Parse the command line of a contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("engine", nargs="?", default="")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    return Assignment(WORKS[args.work], args.rounds, args.engine, args.device)


def report(milliseconds: Sequence[float], *packages: str, engine: str = "") -> None:
    """Print the result for the driver."""
    versions = {name: version(name) for name in ("torch", *packages)}
    result = {"ms": list(milliseconds), "versions": versions}
    print(json.dumps({**result, "engine": engine} if engine else result), flush=True)
