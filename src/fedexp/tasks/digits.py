"""Handwritten digits: 1,797 real images that come with scikit-learn, no download."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedexp.data import partition
from fedexp.data.federation import Federation
from fedexp.errors import UsageError, require
from fedexp.models import mlp
from fedexp.seeding import generator
from fedexp.tasks.task import PAPER_TRAINING, Task, classification

Model = Literal["logistic", "mlp"]
CLASSES = 10
PIXELS = 64
TEST_SHARE = 0.2
HIDDEN = 64


def _best(local_lr: float, **server: float) -> dict[str, float]:
    return {"local.lr": local_lr, **{f"server.{name}": value for name, value in server.items()}}


# By the paper's protocol on seed 0: the highest training accuracy, averaged over the last 10 of 50
# rounds, on half-decade grids of local.lr from 10^-1.5 to 1 and of the server's option. FedAvg on
# the logistic model is the exception, in its favour: the protocol picks server.lr 10 with local.lr
# 0.1, whose loss first blows up for twenty rounds. It has the best of five settings instead, chosen
# by the rounds to several TEST accuracies on seeds 0 to 3; no other algorithm was given that.
TUNED: dict[str, dict[str, dict[str, float]]] = {
    "digits": {
        "fedavg": _best(1.0, lr=1.0),
        "fedexp": _best(1.0, eps=0.1),
        "scaffold": _best(1.0, lr=1.0),
        "scaffold-exp": _best(1.0, eps=1e-3),
        "fedprox": {**_best(1.0, lr=1.0), "client.mu": 1e-3},
        "fedadagrad": _best(0.1, lr=1.0),
        "fedadam": _best(10**-0.5, lr=0.1),
        "fedyogi": _best(10**-0.5, lr=0.1),
        "fedavgm": _best(1.0, lr=10**-0.5),
        "fedexp-m": _best(10**-0.5, eps=0.1),
    },
    "digits-mlp": {
        "fedavg": _best(1.0, lr=1.0),
        "fedexp": _best(10**-0.5, eps=10**-2.5),
        "scaffold": _best(10**-0.5, lr=10**0.5),
        "scaffold-exp": _best(10**-0.5, eps=1e-3),
        "fedprox": {**_best(1.0, lr=1.0), "client.mu": 0.01},
        "fedadagrad": _best(10**-0.5, lr=10**-0.5),
        "fedadam": _best(10**-0.5, lr=0.1),
        "fedyogi": _best(10**-0.5, lr=0.1),
        "fedavgm": _best(10**-0.5, lr=1.0),
        "fedexp-m": _best(1.0, eps=0.1),
    },
}


def digits(model: Model = "logistic", clients: int = 50, alpha: float = 0.1, seed: int = 0) -> Task:
    """Digits over clients whose classes are drawn from Dirichlet(alpha), equal sizes.

    A fifth of the images, always the same, is the test set. Local training is the paper's: 20
    steps, weight decay 1e-4, gradients clipped at 10, the step size decays by 0.998 a round.

    Args:
        model: "logistic" regression (650 parameters) or "mlp" with one hidden layer (4,810).
        clients: number of clients.
        alpha: heterogeneity; the smaller, the fewer digits a client knows.
        seed: of the partition.
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
        target=0.92,
        tuned=TUNED[name],
    )


def digits_mlp(clients: int = 50, alpha: float = 0.1, seed: int = 0) -> Task:
    """The same digits with a hidden layer of 64 units."""
    return digits("mlp", clients, alpha, seed)


def _load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "the digits come with scikit-learn; install it with: pip install 'fedexp[digits]'"
        ) from None
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)
