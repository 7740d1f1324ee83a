"""Small tasks for tests: classification with any model, and least squares."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task


class BatchNormNet(nn.Module):
    """A model with parameters, averaged buffers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


class Net(nn.Module):
    """A dense model that is not an `nn.Sequential`, which the dense engine would train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def dropout_net() -> nn.Module:
    """Build a model with dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def classes_task(
    build: type | object = BatchNormNet, sizes: tuple[int, ...] = (10, 6, 14, 7)
) -> Task:
    """Build a task of three Gaussian classes, with clients of unequal size."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sum(sizes))
    x = rng.normal(size=(3, 4))[y] + 0.3 * rng.normal(size=(len(y), 4))
    fields = {"x": torch.from_numpy(x.astype(np.float32)), "y": torch.from_numpy(y)}
    offsets = np.cumsum([0, *sizes])
    return Task(
        name="classes",
        objective=ModuleObjective(build),  # type: ignore[arg-type]
        train=Federation(fields, offsets),
        test=fields,
        local=fx.LocalTraining(lr=0.1, steps=5, batch_size=4),
    )


def least_squares(clients: int = 4, rows: int = 3, dim: int = 20, seed: int = 0) -> Task:
    """Build the synthetic least-squares task, by default with 4 clients of 3 rows."""
    return fx.tasks.synthetic(clients=clients, rows=rows, dim=dim, seed=seed)


class LinearModel(nn.Module):
    """f(x) = <x, w> with w = 0 at the start."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def vectors_task(updates: torch.Tensor, broken: tuple[int, ...] = ()) -> Task:
    """Build a task of K clients whose updates are the rows of `updates` [K, d] in every round.

    The loss of a client is <Δ_i, w>, of which it takes one step of length 1. Updates of `broken`
    clients are not finite.
    """
    y = torch.zeros(len(updates), dtype=updates.dtype)
    y[list(broken)] = 1.0
    fields = {"x": updates, "y": y}
    return Task(
        name="vectors",
        objective=ModuleObjective(
            lambda: LinearModel(updates.shape[1], updates.dtype),
            loss=lambda output, y: output / (1 - y),
            classifies=False,
        ),
        train=Federation(fields, np.arange(len(updates) + 1)),
        test=None,
        local=fx.LocalTraining(lr=1.0, steps=1, batch_size=None),
    )
