"""Handwritten digits: 1,797 real images that are part of scikit-learn, without a download."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedexp.data import partition
from fedexp.data.federation import Federation
from fedexp.errors import require
from fedexp.models import mlp
from fedexp.optional import extra
from fedexp.seeding import generator
from fedexp.tasks.recipe import PAPER_TRAINING, RECIPES
from fedexp.tasks.supervised import classification
from fedexp.tasks.task import Task

Model = Literal["logistic", "mlp"]
CLASSES = 10
PIXELS = 64
TEST_SHARE = 0.2
HIDDEN = 64


def digits(model: Model = "logistic", clients: int = 50, alpha: float = 0.1, seed: int = 0) -> Task:
    """Return the digits over clients of equal size, with classes from Dirichlet(alpha).

    A fifth of the images, always the same, is the test set. Local training is the paper's: 20
    steps, weight decay 1e-4, gradients clipped at 10, the step size decays by 0.998 per round.

    Args:
        model: "logistic" regression (650 parameters) or "mlp" with one hidden layer (4,810).
        clients: number of clients.
        alpha: heterogeneity; the smaller, the fewer digits a client has.
        seed: seed of the partition.
    """
    require(model in ("logistic", "mlp"), f"model must be logistic or mlp, not {model!r}")
    x, y = _load()
    order = generator(0, "digits test set").permutation(len(y))
    held_out, rest = np.split(order, [int(TEST_SHARE * len(y))])
    parts = partition.dirichlet(y[rest], clients, alpha, generator(seed, "digits partition"))
    name = "digits" if model == "logistic" else "digits-mlp"
    return classification(
        name,
        partial(mlp, PIXELS, () if model == "logistic" else HIDDEN, CLASSES),
        train=Federation.from_parts({"x": x[rest], "y": y[rest]}, parts),
        test={"x": torch.from_numpy(x[held_out]), "y": torch.from_numpy(y[held_out])},
        local=replace(PAPER_TRAINING, lr=0.1),
        rounds=60,
        cohort=min(10, clients),
        **RECIPES[name],
    )


def digits_mlp(clients: int = 50, alpha: float = 0.1, seed: int = 0) -> Task:
    """Return the digits with a hidden layer of 64 units. Arguments as for `digits`."""
    return digits("mlp", clients, alpha, seed)


def _load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    datasets = extra("sklearn.datasets", "the task digits", package="scikit-learn", group="digits")
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)
