"""A study as a user would write it, by the public API alone; `mypy --strict` accepts it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

import fedexp as fx
from fedexp.flower import FedAdam, FedAvgM, FedExP, RuleStrategy
from fedexp.privacy import CentralPrivacy, LocalPrivacy
from fedexp.server import Metrics, State


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@dataclass(frozen=True)
class SignAverage(fx.ServerRule):
    """Step along the sign of the mean update."""

    lr: float = 0.01

    def step(
        self, params: Tensor, aggregate: fx.Aggregate, state: State
    ) -> tuple[Tensor, State, Metrics]:
        next_params = params - self.lr * aggregate.mean.sign()
        return next_params, state, {"server_lr": torch.tensor(self.lr)}


def build_task() -> fx.tasks.Task:
    """Build the task: three classes of points, distributed over ten clients."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    x = (rng.normal(size=(3, 4))[y] + 0.3 * rng.normal(size=(200, 4))).astype(np.float32)
    parts = fx.data.partition.dirichlet(y, clients=10, alpha=0.5, rng=rng)
    train = fx.data.Federation.from_parts(
        {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, parts
    )
    return fx.tasks.classification("mine", Net, train, test=train.fields)


def final_accuracies(rounds: int = 2) -> dict[str, float]:
    """Return the last test accuracy of several algorithms."""
    task = build_task()
    mine = fx.Algorithm("sign", client=fx.Prox(0.1), server=SignAverage(lr=0.02))
    found: dict[str, float] = {}
    for algorithm in (fx.fedavg(), fx.fedexp(eps=1e-3), fx.scaffold_exp(), mine):
        for record in fx.simulate(task, algorithm, rounds=rounds, cohort=5, seed=1):
            accuracy: float | None = record.test_accuracy
            found[algorithm.name] = accuracy or 0.0
    return found


def spent(rounds: int = 2) -> tuple[float, float]:
    """Return ε of a central and of a local mechanism."""
    settings: list[CentralPrivacy | LocalPrivacy] = [
        CentralPrivacy(clip=1.0, delta=1e-3, epsilon=8.0, sampling="poisson"),
        LocalPrivacy(clip=1.0, delta=1e-3, noise_multiplier=1.0, rounds=rounds),
    ]
    last: list[float] = []
    for privacy in settings:
        *_, record = fx.simulate(build_task(), fx.fedexp(), rounds, 5, privacy=privacy)
        last.append(record.metrics["epsilon"])
    return last[0], last[1]


def strategies() -> list[RuleStrategy]:
    """Return strategies of several algorithms."""
    return [
        FedExP(0.5, 0.0, 10, eps=1e-2, max_step=4.0, checkpoint="runs/first", seed=1),
        FedExP(fraction_evaluate=0.0, privacy=CentralPrivacy(1.0, 1e-5, noise_multiplier=1.0)),
        FedAvgM(server_learning_rate=0.5, server_momentum=0.8, weighting="uniform"),
        FedAdam(eta=0.1, beta_1=0.8, form="standard", model=Net()),
        RuleStrategy(algorithm=fx.Algorithm("sign", server=SignAverage())),
    ]


def deploy(grid: Grid) -> ArrayRecord:
    """Train on a Flower grid."""
    arrays = ArrayRecord(Net().state_dict())
    return strategies()[0].start(grid, arrays, num_rounds=3).arrays
