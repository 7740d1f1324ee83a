"""The plan of a round: which clients, and which batches each of them sees.

Pure functions of (seed, round, client), so every engine trains on the same examples.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.seeding import generator


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
    steps = local.steps_for(size)
    if local.batch_size is None:
        return [np.arange(size)] * steps
    rng = generator(seed, "batches", round, client)
    batch = local.batch_size
    epochs = math.ceil(steps / math.ceil(size / batch))
    planned = [
        order[at : at + batch]
        for order in (rng.permutation(size) for _ in range(epochs))
        for at in range(0, size, batch)
    ]
    return planned[:steps]
