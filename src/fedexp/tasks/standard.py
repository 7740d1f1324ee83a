"""Standard tasks of the field, with the settings for which FLUTE and FedML publish times.

MNIST with logistic regression, FEMNIST with a CNN and CIFAR-100 with ResNet-18 (and `shakespeare`,
in `shakespeare.py`): 10 clients per round, one epoch of plain SGD. Clients, batch sizes, step sizes
and numbers of rounds are from the table in the README of microsoft/msrflute (commit 8bfe085), which
are FedML's (release 0.7.303) and, except for MNIST, those of Reddi et al. (2021).
`benchmarks/standard.py` times them. Clients have the same weight here; FLUTE and FedML weigh them
by their examples, as `weighting=size` does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedexp.data.transforms import Images
from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.models import logistic, resnet18
from fedexp.seeding import generator
from fedexp.tasks.images import dirichlet_images, emnist, load_splits
from fedexp.tasks.recipe import RECIPES
from fedexp.tasks.supervised import classification
from fedexp.tasks.task import Task

COHORT = 10
CLASSES_PER_CLIENT, FEWEST, SPREAD = 2, 5, 1.6


def mnist(clients: int = 1000, seed: int = 0, folder: str | None = None) -> Task:
    """Return MNIST over 1,000 clients with two digits each; logistic regression.

    The number of images follows a power law, as in the partition of Li et al. (2020) that FedML
    distributes, drawn anew (`power_law`). FedML and FLUTE, which publish an accuracy of about 81 %,
    have a sigmoid before the softmax; this model has none.

    Args:
        clients: number of clients, at most about 5,400; with fewer than 9, training data lack
            some digits.
        seed: seed of the partition.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    data = load_splits("mnist", folder)
    parts = power_law(data.train["y"].numpy(), clients, generator(seed, "mnist partition"))
    return classification(
        "mnist",
        partial(logistic, 28 * 28, data.classes),
        data.federation(parts),
        data.test,
        transform=Images((0.1307,), (0.3081,), augment=None),
        local=LocalTraining(lr=0.03, epochs=1, batch_size=10),
        rounds=100,
        cohort=min(COHORT, clients),
        evaluate_every=20,
        **RECIPES["mnist"],
    )


def femnist(folder: str | None = None) -> Task:
    """Return EMNIST by writer, 10 writers per round, one epoch of batches of 20; a CNN.

    Data and network are those of the task `emnist`.

    Args:
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    return _standard("femnist", emnist(folder), rounds=1500)


def fed_cifar100(
    clients: int = 500, alpha: float = 0.13, seed: int = 0, folder: str | None = None
) -> Task:
    """Return CIFAR-100 over 500 clients of 100 images; ResNet-18 with GroupNorm.

    The network begins with a 7x7 convolution and max-pooling of stride 2, as those of Reddi et al.,
    FLUTE and FedML do: a fifteenth of the arithmetic of the task `cifar100`. GroupNorm has 2 groups
    as in Reddi et al.; FedML has groups of 32 channels.

    Reddi et al. assign classes by Pachinko allocation, with Dirichlet(0.1) over superclasses and
    Dirichlet(10) within each; here they are drawn from Dirichlet(0.13) over all classes, which
    gives two images of a client the same class with the same expected probability, 8 %.
    Images are cropped after padding by 4 pixels, not to 24x24.

    Args:
        clients: number of clients.
        alpha: heterogeneity; the smaller, the fewer classes a client has.
        seed: seed of the partition.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    model = partial(resnet18, stem="imagenet")
    task = dirichlet_images("cifar100", folder, clients, alpha, seed, "example", model)
    return _standard("fed-cifar100", task, rounds=4000)


def _standard(name: str, task: Task, rounds: int) -> Task:
    """Return a task of the paper with the settings of the field."""
    return replace(
        task,
        name=name,
        local=LocalTraining(lr=0.1, epochs=1, batch_size=20),
        rounds=rounds,
        cohort=min(COHORT, task.train.clients),
        evaluate_every=50,
        target=None,
        tuned=RECIPES[name]["tuned"],
        released={},
    )


def power_law(
    labels: NDArray[np.int64], clients: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Partition examples so that client i has two classes, i and i + 1 modulo their number.

    Each class is divided in proportion to log-normal draws with sigma 1.6, at least 5 examples for
    each of its clients. The standard deviation of the sizes of 1,000 clients is about 1.5 times
    their mean, as that of Li et al. (2020, Table 1).

    Args:
        labels: the class of each example.
        clients: number of clients.
        rng: draws the proportions, and shuffles the examples of each class.

    >>> parts = power_law(np.arange(60) % 3, 3, np.random.default_rng(0))
    >>> [sorted(set((part % 3).tolist())) for part in parts], sum(map(len, parts))
    ([[0, 1], [1, 2], [0, 2]], 60)
    """
    require(clients >= 1, f"need at least one client, not {clients}")
    classes = np.unique(labels)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for c, label in enumerate(classes):
        pool = rng.permutation(np.flatnonzero(labels == label))
        owners = [i for i in range(clients) if (c - i) % len(classes) < CLASSES_PER_CLIENT]
        if not owners:
            continue
        spare = len(pool) - FEWEST * len(owners)
        require(
            spare >= 0,
            f"cannot give {clients} clients {FEWEST} examples of each of their classes; use fewer "
            "clients",
        )
        odds = rng.lognormal(sigma=SPREAD, size=len(owners))
        sizes = FEWEST + rng.multinomial(spare, odds / odds.sum())
        for owner, rows in zip(owners, np.split(pool, np.cumsum(sizes)[:-1]), strict=True):
            parts[owner].append(rows)
    return [np.sort(np.concatenate(rows)) for rows in parts]
