"""The batches of many clients side by side: what the batched engine works through.

Only numbers, sizes and places of the clients are planned here; which rows a step sees is worked out
on the device, so that a GPU waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.engine.plan import step_lengths
from fedexp.engine.work import Work


@dataclass(frozen=True, eq=False)
class CohortPlan:
    """The batches of K clients over S steps.

    Attributes:
        who: numbers, sizes and first rows of the clients, [3, K].
        lengths: real examples in each batch, [S, K]; 0 where a client has no more steps.
        width: examples of a padded batch.
        reach: examples that any client goes through at most, epoch after epoch.
        draws: random numbers of the transform, [S, K, width, ...], or None.
    """

    who: NDArray[np.int64]
    lengths: NDArray[np.int64]
    width: int
    reach: int
    draws: NDArray[Any] | None

    @property
    def steps(self) -> NDArray[np.int64]:
        """How many steps each client takes."""
        return (self.lengths > 0).sum(axis=0)


def plan_cohort(work: Work, clients: Sequence[int]) -> CohortPlan:
    """Every client's batches: exactly those that the loop would use."""
    offsets, local, chosen = work.task.train.offsets, work.local, np.asarray(clients)
    sizes = offsets[chosen + 1] - offsets[chosen]
    lengths = step_lengths(sizes, local)
    largest, batch = int(sizes.max()), local.batch_size
    width = min(batch or largest, largest)
    # on a GPU the same for every cohort, so that a captured program fits the next one as well
    farthest = work.task.train.largest if work.task.train.device.type == "cuda" else largest
    reach = farthest + len(lengths) * (batch or 0)
    who = np.stack([chosen, sizes, work.task.train.places(chosen)])
    return CohortPlan(who, lengths, width, reach, _draws(work, clients, lengths, width))


def _draws(
    work: Work, clients: Sequence[int], lengths: NDArray[np.int64], widest: int
) -> NDArray[Any] | None:
    """The transform's random numbers, drawn client by client as the loop draws them."""
    transform, drawn = work.task.transform, None
    if transform is None:
        return None
    for k, client in enumerate(clients):
        mine = lengths[lengths[:, k] > 0, k]
        values = transform.draw_steps(work.augmentation(client), mine)
        if values is None:
            return None
        if drawn is None:
            drawn = np.zeros((*lengths.shape, widest, *values.shape[1:]), values.dtype)
        ends = np.cumsum(mine)
        for s, (begin, end) in enumerate(zip(ends - mine, ends, strict=True)):
            drawn[s, k, : end - begin] = values[begin:end]
    return drawn
