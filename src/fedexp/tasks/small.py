"""The image tasks reduced to minutes on a CPU: fewer images, fewer steps, a small model.

For experiments and for `--scale small`; the figures of the paper do not apply to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fedexp.data.federation import Batch, Federation
from fedexp.data.sources.splits import RawSplits
from fedexp.data.transforms import Augment
from fedexp.errors import require
from fedexp.models import cifar_cnn
from fedexp.seeding import generator
from fedexp.tasks import images
from fedexp.tasks.task import Task

WRITERS, CLIENTS, COHORT = 20, 10, 5
TRAIN_IMAGES, TEST_IMAGES = 1000, 500
STEPS, BATCH = 10, 10


def emnist_small(writers: int = WRITERS, folder: str | None = None) -> Task:
    """Return EMNIST with its first 20 writers, 5 of them per round, 10 steps of 10 images.

    Args:
        writers: number of clients.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    require(writers >= 1, f"writers must be at least 1, not {writers}")
    whole = images.emnist(folder)
    ends = whole.train.offsets[: writers + 1]
    fields = {name: value[: ends[-1]] for name, value in whole.train.fields.items()}
    assert whole.test is not None
    task = replace(whole, train=Federation(fields, ends), test=_thinned(whole.test, TEST_IMAGES))
    return _reduced("emnist-small", task)


def cifar10_small(
    clients: int = CLIENTS,
    alpha: float = images.ALPHA,
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
    clients: int = CLIENTS,
    alpha: float = images.ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return 1,000 images of CIFAR-100 over 10 clients. Arguments as for `cifar10_small`."""
    return _small_images("cifar100", folder, clients, alpha, seed, augment)


def cinic10_small(
    clients: int = CLIENTS,
    alpha: float = images.ALPHA,
    seed: int = 0,
    augment: Augment | None = "example",
    folder: str | None = None,
) -> Task:
    """Return 1,000 images of CINIC-10 over 10 clients. Arguments as for `cifar10_small`."""
    return _small_images("cinic10", folder, clients, alpha, seed, augment)


def _small_images(
    name: str, folder: str | None, clients: int, alpha: float, seed: int, augment: Augment | None
) -> Task:
    data: RawSplits = images.load_splits(name, folder)
    few = replace(
        data,
        train=_thinned(data.train, TRAIN_IMAGES),
        test=_thinned(data.test, TEST_IMAGES),
    )
    build: Callable[[], torch.nn.Module] = partial(cifar_cnn, data.classes)
    task = images.dirichlet_images(few, build, clients, alpha, seed, augment)
    return _reduced(f"{name}-small", task)


def _thinned(batch: Batch, count: int) -> Batch:
    """Return a fixed random subset; the first examples of a file may not cover all classes."""
    order = generator(0, "small task").permutation(len(batch["y"]))
    chosen = torch.from_numpy(np.sort(order[:count]))
    return {name: value[chosen] for name, value in batch.items()}


def _reduced(name: str, task: Task) -> Task:
    return replace(
        task,
        name=name,
        local=replace(task.local, steps=STEPS, batch_size=BATCH),
        rounds=20,
        cohort=min(COHORT, task.train.clients),
        evaluate_every=4,
        target=None,
    )
