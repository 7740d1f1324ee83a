"""The plan of a round: which clients, and which batches each of them sees.

Pure functions of (seed, round, client), so every engine trains on the same examples.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.seeding import generator, hashed, torch_seed

EPOCH_BITS = 20  # a sort key has so many bits for the epoch, and 43 for chance


def sample_cohort(seed: int, round: int, clients: int, cohort: int | None) -> NDArray[np.int64]:
    """The clients of a round, in increasing order; all of them when `cohort` is None.

    >>> sample_cohort(seed=0, round=1, clients=4, cohort=None).tolist()
    [0, 1, 2, 3]
    """
    if cohort is None or cohort == clients:
        return np.arange(clients)
    require(cohort >= 1, f"the cohort must be at least 1, not {cohort}")
    require(
        cohort <= clients,
        f"the cohort of {cohort} is larger than the federation of {clients} clients",
    )
    chosen = generator(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(chosen)


def plan_batches(
    seed: int, round: int, client: int, size: int, local: LocalTraining
) -> list[NDArray[np.int64]]:
    """The examples of each local step, by their position among the client's own.

    The client goes through its data in shuffled epochs until the steps are done; the last batch of
    an epoch may be smaller. This is what a shuffling loader that is restarted gives (audit B19).

    >>> [len(b) for b in plan_batches(0, 1, 0, size=5, local=LocalTraining(steps=4, batch_size=2))]
    [2, 2, 1, 2]
    """
    steps, batch = local.steps_for(size), local.batch_size
    if batch is None:
        return [np.arange(size)] * steps
    key = torch.tensor(batch_key(seed, round))
    one, own = torch.tensor([client]), torch.tensor([size])
    epochs = math.ceil(steps / math.ceil(size / batch))
    orders = shuffled(key, one, own, epochs * size).view(epochs, size).numpy()
    planned = [order[at : at + batch] for order in orders for at in range(0, size, batch)]
    return planned[:steps]


@lru_cache(maxsize=4)
def batch_key(seed: int, round: int) -> int:
    """What the batches of a round follow from, beside the client."""
    return torch_seed(seed, "batches", round)


def shuffled(key: Tensor, clients: Tensor, sizes: Tensor, length: int) -> Tensor:
    """The examples of K clients, epoch after epoch, each epoch in an order of its own, [K, length].

    Integer arithmetic only, so every device gives the same. Epochs that `length` cuts off are not
    shuffled fairly: ask for all of what is used.
    """
    epoch = torch.arange(length, device=clients.device) // sizes[:, None]
    lottery = hashed(key, clients, length) >> EPOCH_BITS
    order = torch.sort((epoch << (63 - EPOCH_BITS)) + lottery, dim=1, stable=True).indices
    return order - epoch * sizes[:, None]


def step_lengths(sizes: NDArray[np.int64], local: LocalTraining) -> NDArray[np.int64]:
    """How many examples each step of each client sees, [S, K]; 0 where it has no more steps.

    >>> step_lengths(np.array([5, 2]), LocalTraining(epochs=1, batch_size=2)).T.tolist()
    [[2, 2, 1], [2, 0, 0]]
    """
    batch = sizes if local.batch_size is None else np.full_like(sizes, local.batch_size)
    per_epoch = -(-sizes // batch)
    steps = np.full_like(sizes, local.steps)
    if local.epochs is not None:
        steps = local.epochs * per_epoch
    step = np.arange(steps.max())[:, None]
    left = sizes - step % per_epoch * batch
    lengths: NDArray[np.int64] = np.where(step < steps, np.minimum(batch, left), 0)
    return lengths


def step_rows(
    key: Tensor, who: Tensor, steps: int, width: int, length: int, batch_size: int | None
) -> Tensor:
    """The rows of a federation that K clients see, [S, K, width], on the device of `who`.

    `who` has the clients' numbers, sizes and first rows, [3, K]; `length` is as far as any of them
    reaches into its epochs. What fills up a short batch is the client's first row.
    """
    clients, sizes, first = who
    place = torch.arange(width, device=who.device)
    if batch_size is None:
        inside = torch.where(place < sizes[:, None], place, 0)
        return (first[:, None] + inside).expand(steps, -1, -1)
    order = shuffled(key, clients, sizes, length)
    step = torch.arange(steps, device=who.device)[:, None]
    per_epoch = (sizes + (batch_size - 1)) // batch_size
    at = (step % per_epoch * batch_size)[:, :, None] + place
    reached = (step // per_epoch * sizes)[:, :, None] + at
    short = at >= sizes[:, None]
    picked = order.gather(1, reached.clamp(max=length - 1).movedim(1, 0).flatten(1))
    picked = picked.view(len(clients), steps, width).movedim(1, 0)
    return first[:, None] + torch.where(short, 0, picked)
