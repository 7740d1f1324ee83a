"""Own regression with a custom loss: the 90th percentile of a disease, by age group."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import fedexp as fx

x, y = load_diabetes(return_X_y=True)
x, y = x / x.std(0), (y[:, None] - y.mean()) / y.std()
ids = np.digitize(x[:, 0], np.quantile(x[:, 0], np.linspace(0, 1, 21)[1:-1]))  # 20 age groups
held_out = np.random.default_rng(0).random(len(y)) < 0.25


def pinball(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the quantile loss, one value per example."""
    error = target - prediction
    return torch.maximum(0.9 * error, -0.1 * error).squeeze(1)


def coverage(prediction: Tensor, target: Tensor) -> Tensor:
    return (target <= prediction).float().mean()


task = fx.supervised(
    "my-regression",
    model=lambda: nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)),
    train=fx.Federation.from_ids({"x": x[~held_out], "y": y[~held_out]}, ids[~held_out]),
    test={"x": x[held_out], "y": y[held_out]},
    loss=pinball,
    metrics={"coverage": coverage},
    local=fx.LocalTraining(lr=0.1, epochs=2, batch_size=8),
    cohort=0.5,
    rounds=40,
)

if __name__ == "__main__":
    study = fx.compare(task, ["fedavg", "fedexp", "scaffold"], seeds=3)
    print(study.table())
    print(study.report("regression.html"))
