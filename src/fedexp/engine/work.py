"""`Work`: what one round asks of an engine, and the batches that every engine must use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedexp.algorithms import Algorithm
from fedexp.data.federation import Batch
from fedexp.engine.plan import plan_batches, sample_cohort
from fedexp.local import LocalTraining
from fedexp.seeding import generator
from fedexp.tasks.task import Task, Weighting


@dataclass(frozen=True, eq=False)
class Work:
    """What one round asks of an engine."""

    task: Task
    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting
    seed: int
    round: int
    cohort: NDArray[np.int64]

    @property
    def lr(self) -> float:
        return self.local.lr_at(self.round)

    def weight(self, client: int) -> float:
        return float(self.task.train.sizes[client]) if self.weighting == "size" else 1.0

    @property
    def total_weight(self) -> float:
        """Of all clients there are."""
        train = self.task.train
        return float(train.offsets[-1] if self.weighting == "size" else train.clients)

    def after(self) -> Work:
        """The work of the next round, whose cohort is as large."""
        number = self.round + 1
        cohort = sample_cohort(self.seed, number, self.task.train.clients, len(self.cohort))
        return replace(self, round=number, cohort=cohort)

    def batches(self, client: int) -> Iterator[Batch]:
        """The batches of a client, step by step."""
        train, size = self.task.train, int(self.task.train.sizes[client])
        if self.local.batch_size is None and self.task.transform is None:
            whole = train.client(client)
            yield from (whole for _ in range(self.local.steps_for(size)))
            return
        rng = self.augmentation(client)
        for rows in plan_batches(self.seed, self.round, client, size, self.local):
            batch = train.batch(client, rows)
            if self.task.transform is not None:
                draws = self.task.transform.draw(rng, len(rows))
                batch = self.task.transform.train(batch, draws)
            yield batch

    def augmentation(self, client: int) -> np.random.Generator:
        """The client's random numbers for augmentation, drawn step after step."""
        return generator(self.seed, "augment", self.round, client)
