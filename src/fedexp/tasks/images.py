"""The paper's tasks on images: EMNIST, CIFAR-10, CIFAR-100 and CINIC-10, full-size and small.

20 clients per round, 20 local steps of batches of 50, weight decay 1e-4, gradients clipped at 10,
client step size decayed by 0.998 per round, 500 rounds (sec. 6, App. D;
docs/paper.md#training-settings, docs/paper.md#experimental-settings). The data must be in the data
folder: `fedexp data fetch NAME` downloads them.

The small tasks take minutes on a CPU: fewer images, fewer steps, a small model. They are for
experiments and for `--scale small`; the figures of the paper do not apply to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from fedexp.data import partition
from fedexp.data.federation import Batch, Federation
from fedexp.data.transforms import Augment, Images
from fedexp.errors import require
from fedexp.models import Pool, cifar_cnn, emnist_cnn, resnet18
from fedexp.seeding import generator
from fedexp.tasks.recipe import PAPER_TRAINING, RECIPES
from fedexp.tasks.supervised import classification
from fedexp.tasks.task import Task

if TYPE_CHECKING:
    from fedexp.data.datasets import RawSplits

COHORT, ROUNDS, ALPHA = 20, 500, 0.3
EVALUATE_EVERY = 5  # docs/paper.md#released-evaluation; EMNIST, with 671,585 images, less often
SMALL_WRITERS, SMALL_CLIENTS, SMALL_COHORT = 20, 10, 5
SMALL_TRAIN_IMAGES, SMALL_TEST_IMAGES = 1000, 500
SMALL_STEPS, SMALL_BATCH = 10, 10

# Mean and standard deviation of the training images per channel, pixels in [0, 1].
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
}

# How EMNIST's pixels enter the model, as mean and std of `Images`; a negative std inverts an image.
Pixels = Literal["tff", "ink", "normalised"]
EMNIST_PIXELS = {
    "tff": ((0.0,), (1.0,)),
    "ink": ((1.0,), (-1.0,)),
    "normalised": ((1 - 0.1736,), (-0.3317,)),
}


def emnist(folder: str | None = None, pixels: Pixels = "tff") -> Task:
    """Return EMNIST: characters of 3,400 writers, each a client; the network of Reddi et al.

    Args:
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
        pixels: "tff" for grey values as TensorFlow Federated gives them, background 1 and ink 0;
            "ink" for ink 1 and background 0; "normalised" for the latter less 0.1736, divided by
            0.3317, which are mean and deviation of EMNIST as torchvision has it, whose characters
            fill the image (0.0385 and 0.1642 for those of the 294 writers). The paper does not
            state it; with these values the cell of Figure 1 with the client step 1 trains.
    """
    require(pixels in EMNIST_PIXELS, f"pixels is tff, ink or normalised, not {pixels!r}")
    data = load_splits("emnist", folder)
    train = data.federation()
    return classification(
        "emnist",
        partial(emnist_cnn, data.classes),
        train,
        data.test,
        transform=Images(*EMNIST_PIXELS[pixels], augment=None),
        local=replace(PAPER_TRAINING, lr=10**-0.5),
        rounds=ROUNDS,
        cohort=min(COHORT, train.clients),
        evaluate_every=5 * EVALUATE_EVERY,
        **RECIPES["emnist"],
    )


def cifar10(
    clients: int = 100,
    alpha: float = ALPHA,
    seed: int = 0,
    pool: Pool = "adaptive",
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return CIFAR-10 over 100 clients of equal size, Dirichlet(0.3); ResNet-18.

    Args:
        clients: number of clients.
        alpha: heterogeneity; the smaller, the fewer classes a client has.
        seed: seed of the partition.
        pool: "avg3" for the pooling of the authors' code (docs/paper.md#released-resnet).
        augment: "batch" for one crop and flip per batch, as in the authors' code
            (docs/paper.md#released-augmentation).
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    return dirichlet_images("cifar10", folder, clients, alpha, seed, augment, resnet18, pool)


def cifar100(
    clients: int = 100,
    alpha: float = ALPHA,
    seed: int = 0,
    pool: Pool = "adaptive",
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return CIFAR-100 over 100 clients. Arguments as for `cifar10`."""
    return dirichlet_images("cifar100", folder, clients, alpha, seed, augment, resnet18, pool)


def cinic10(
    clients: int = 200,
    alpha: float = ALPHA,
    seed: int = 0,
    pool: Pool = "adaptive",
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return CINIC-10 over 200 clients. Arguments as for `cifar10`."""
    return dirichlet_images("cinic10", folder, clients, alpha, seed, augment, resnet18, pool)


def cifar10_cnn(
    clients: int = 10,
    alpha: float = ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return CIFAR-10 over 10 clients that all take part, with a small CNN.

    The task of the study of iterate averaging (docs/paper.md#averaging-study), judged by training
    accuracy. Arguments as for `cifar10`.
    """
    task = dirichlet_images("cifar10", folder, clients, alpha, seed, augment, cifar_cnn)
    return replace(task, name="cifar10-cnn", cohort=None, metric="train_accuracy", target=None)


def emnist_small(writers: int = SMALL_WRITERS, folder: str | None = None) -> Task:
    """Return EMNIST with its first 20 writers, 5 of them per round, 10 steps of 10 images.

    Args:
        writers: number of clients.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    require(writers >= 1, f"writers must be at least 1, not {writers}")
    whole = emnist(folder)
    ends = whole.train.offsets[: writers + 1]
    fields = {name: value[: ends[-1]] for name, value in whole.train.fields.items()}
    assert whole.test is not None
    task = replace(
        whole, train=Federation(fields, ends), test=thinned(whole.test, SMALL_TEST_IMAGES)
    )
    return _reduced("emnist-small", task)


def cifar10_small(
    clients: int = SMALL_CLIENTS,
    alpha: float = ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return 1,000 images of CIFAR-10 over 10 clients, Dirichlet(0.3), with a small CNN.

    Args:
        clients: number of clients.
        alpha: heterogeneity; the smaller, the fewer classes a client has.
        seed: seed of the partition.
        augment: "batch" for one crop and flip per batch, as in the authors' code.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    return _small_images("cifar10", folder, clients, alpha, seed, augment)


def cifar100_small(
    clients: int = SMALL_CLIENTS,
    alpha: float = ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return 1,000 images of CIFAR-100 over 10 clients. Arguments as for `cifar10_small`."""
    return _small_images("cifar100", folder, clients, alpha, seed, augment)


def cinic10_small(
    clients: int = SMALL_CLIENTS,
    alpha: float = ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return 1,000 images of CINIC-10 over 10 clients. Arguments as for `cifar10_small`."""
    return _small_images("cinic10", folder, clients, alpha, seed, augment)


def dirichlet_images(
    name: str,
    folder: str | None,
    clients: int,
    alpha: float,
    seed: int,
    augment: Augment | None,
    model: Callable[..., nn.Module],
    *settings: Any,
    few: bool = False,
) -> Task:
    """Return a data set over clients of equal size, with classes from Dirichlet(alpha).

    Args:
        name: name of the data set, and of its recipe.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
        clients: number of clients.
        alpha: heterogeneity.
        seed: seed of the partition.
        augment: see `Images`.
        model: returns a new model, given the number of classes and the settings.
        *settings: of the model.
        few: take a part of the images only.
    """
    data = load_splits(name, folder)
    if few:
        train, test = thinned(data.train, SMALL_TRAIN_IMAGES), thinned(data.test, SMALL_TEST_IMAGES)
        data = replace(data, train=train, test=test)
    rng = generator(seed, f"{name} partition")
    parts = partition.dirichlet(data.train["y"].numpy(), clients, alpha, rng)
    return classification(
        name,
        partial(model, data.classes, *settings),
        data.federation(parts),
        data.test,
        transform=Images(*STATISTICS[name], augment),
        rounds=ROUNDS,
        cohort=min(COHORT, clients),
        evaluate_every=EVALUATE_EVERY,
        **RECIPES[name],
    )


def load_splits(name: str, folder: str | None) -> RawSplits:
    """Return a data set as published."""
    # imported here, because tasks on other data need none of the readers
    from fedexp.data.datasets import load

    return load(name, folder)


def _small_images(
    name: str, folder: str | None, clients: int, alpha: float, seed: int, augment: Augment | None
) -> Task:
    task = dirichlet_images(name, folder, clients, alpha, seed, augment, cifar_cnn, few=True)
    return _reduced(f"{name}-small", task)


def thinned(batch: Batch, count: int) -> Batch:
    """Return a fixed random subset; the first examples of a file may not cover all classes."""
    order = generator(0, "small task").permutation(len(batch["y"]))
    chosen = torch.from_numpy(np.sort(order[:count]))
    return {name: value[chosen] for name, value in batch.items()}


def _reduced(name: str, task: Task) -> Task:
    return replace(
        task,
        name=name,
        local=replace(task.local, steps=SMALL_STEPS, batch_size=SMALL_BATCH),
        rounds=20,
        cohort=min(SMALL_COHORT, task.train.clients),
        evaluate_every=4,
        target=None,
    )
