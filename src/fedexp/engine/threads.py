"""The loop with its clients shared out among threads: what suits large models on a CPU.

Each client is trained as in the loop, by one thread, so its numbers do not depend on how many there
are. Threads that share an operation wait for each other many times in a step; these do not, and a
client's model stays in the cache of a core.
"""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

import torch

from fedexp.data.federation import Batch
from fedexp.engine.loop import Sums, Trained, sum_in_parts, sum_trained, train
from fedexp.engine.pool import Pool
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.objective import ModuleObjective
from fedexp.objective.private import PrivateCopy
from fedexp.seeding import seeded_torch, torch_seed

SMALL_MODEL = 100_000  # parameters; below, python itself takes most of the time, and one at a time


def threads_pay(work: Work, state: SimulationState) -> bool:
    """Whether clients gain by threads of their own: a large model on a CPU with several cores."""
    return (
        isinstance(work.task.objective, ModuleObjective)
        and state.params.device.type == "cpu"
        and state.params.numel() >= SMALL_MODEL
        and min(torch.get_num_threads(), len(work.cohort)) > 1
    )


class Threads:
    """The engine; as many threads as torch would use for one operation.

    Args:
        objective: what clients minimise; every thread has a copy of it.
    """

    def __init__(self, objective: ModuleObjective) -> None:
        self._objective = objective
        self._pool = Pool()
        self._copies: SimpleQueue[PrivateCopy] = SimpleQueue()
        for _ in range(self._pool.count):
            self._copies.put(PrivateCopy(objective))

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        return sum_in_parts(work, state, self.run_clients, least=self._pool.count)

    def run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        """Train some clients, as many at a time as there are threads."""
        trained = self._pool.map(partial(self._train, work, state), clients)
        return sum_trained(work, clients, trained)

    def _train(self, work: Work, state: SimulationState, client: int) -> Trained:
        copy = self._copies.get()
        try:
            copy.seed(torch_seed(work.seed, "layers", work.round, client))
            return train(work, state, client, copy.objective)
        finally:
            self._copies.put(copy)

    def keeps_apart(self, state: SimulationState, batch: Batch) -> bool:
        """Whether clients cannot disturb each other: no layer draws from torch's own generator.

        And whether copies, in which layers change places, still are the model.
        """
        copy = self._copies.get()
        with seeded_torch(0, "trial"):
            before = torch.get_rng_state()
            copy.objective.gradient(state.params.clone(), state.buffers, batch)
            apart = torch.equal(before, torch.get_rng_state())
            apart = apart and copy.agrees(self._objective, state.params, state.buffers, batch)
        self._copies.put(copy)
        return apart
