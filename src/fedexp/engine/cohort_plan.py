"""The batches of many clients side by side: what the batched engine works through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.engine.plan import plan_batches
from fedexp.engine.work import Work


@dataclass(frozen=True, eq=False)
class CohortPlan:
    """The batches of K clients over S steps, padded to the longest there can be.

    Attributes:
        rows: rows of the federation's fields, [S, K, B]; padding repeats a client's first row.
        lengths: real examples in each batch, [S, K]; 0 where a client has no more steps.
        draws: random numbers of the transform, [S, K, B, ...], or None.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    draws: NDArray[Any] | None

    @property
    def steps(self) -> NDArray[np.int64]:
        """How many steps each client takes."""
        return (self.lengths > 0).sum(axis=0)


def plan_cohort(work: Work, clients: Sequence[int]) -> CohortPlan:
    """Every client's batches: exactly those that the loop would use."""
    sizes, offsets = work.task.train.sizes, work.task.train.offsets
    planned = [plan_batches(work.seed, work.round, c, int(sizes[c]), work.local) for c in clients]
    steps = max(map(len, planned))
    largest = int(sizes[list(clients)].max())
    widest = min(work.local.batch_size or largest, largest)
    rows = np.empty((steps, len(clients), widest), dtype=np.int64)
    lengths = np.zeros((steps, len(clients)), dtype=np.int64)
    for k, (client, batches) in enumerate(zip(clients, planned, strict=True)):
        rows[:, k] = offsets[client]
        for s, batch in enumerate(batches):
            rows[s, k, : len(batch)] = batch + offsets[client]
            lengths[s, k] = len(batch)
    return CohortPlan(rows, lengths, _draws(work, clients, lengths, widest))


def _draws(
    work: Work, clients: Sequence[int], lengths: NDArray[np.int64], widest: int
) -> NDArray[Any] | None:
    """The transform's random numbers, drawn client by client as the loop draws them."""
    transform, drawn = work.task.transform, None
    if transform is None:
        return None
    for k, client in enumerate(clients):
        rng = work.augmentation(client)
        for s in np.flatnonzero(lengths[:, k]):
            values = transform.draw(rng, int(lengths[s, k]))
            if values is None:
                return None
            if drawn is None:
                drawn = np.zeros((*lengths.shape, widest, *values.shape[1:]), values.dtype)
            drawn[s, k, : len(values)] = values
    return drawn
