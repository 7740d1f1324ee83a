"""The tasks of `startup.py`: shapes of the digits, EMNIST and CIFAR-10, on generated data."""

from functools import partial

import numpy as np
import torch

import fedexp as fx
from fedexp.data import Images
from fedexp.tasks.recipe import PAPER_TRAINING


def pixels(clients: int, each: int, shape: tuple[int, ...], classes: int) -> fx.Federation:
    """Return random images and labels; their values do not matter for time."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(rng.integers(0, classes, len(x)))}
    return fx.Federation(fields, np.arange(clients + 1) * each)


def mlp() -> fx.Task:
    """Return a task like the digits, with the MLP."""
    return fx.classification(
        "mlp",
        partial(fx.models.mlp, 64, 64, 10),
        pixels(50, 36, (1, 8, 8), 10),
        transform=Images((0.5,), (0.25,), augment=None),
        local=fx.LocalTraining(lr=0.1, steps=20, batch_size=50),
        cohort=10,
        evaluate_every=2,
    )


def emnist() -> fx.Task:
    """Return a task like EMNIST with 294 writers."""
    return fx.classification(
        "emnist",
        fx.models.emnist_cnn,
        pixels(294, 200, (1, 28, 28), 62),
        transform=Images((0.0,), (1.0,), augment=None),
        local=PAPER_TRAINING,
        cohort=20,
        evaluate_every=2,
    )


def resnet() -> fx.Task:
    """Return a task like CIFAR-10, with ResNet-18."""
    return fx.classification(
        "resnet",
        partial(fx.models.resnet18, 10),
        pixels(100, 500, (3, 32, 32), 10),
        transform=Images((0.5,) * 3, (0.25,) * 3),
        local=PAPER_TRAINING,
        cohort=20,
        evaluate_every=2,
    )
