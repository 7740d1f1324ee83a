"""The plain engine: one client after another. The reference that faster engines must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.data.federation import Batch
from fedexp.engine.plan import plan_batches
from fedexp.engine.state import SimulationState
from fedexp.local import LocalTraining, local_step
from fedexp.seeding import generator, seeded_torch
from fedexp.tasks.task import Task, Weighting

SUMMED_BYTES = 32 * 2**20  # updates held at a time; one, where one is larger


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

    def batches(self, client: int) -> Iterator[Batch]:
        """The batches of a client, step by step."""
        train, size = self.task.train, int(self.task.train.sizes[client])
        if self.local.batch_size is None and self.task.transform is None:
            whole = train.client(client)
            yield from (whole for _ in range(self.local.steps_for(size)))
            return
        for step, rows in enumerate(plan_batches(self.seed, self.round, client, size, self.local)):
            yield self._transformed(train.batch(client, rows), client, step)

    def _transformed(self, batch: Batch, client: int, step: int) -> Batch:
        transform = self.task.transform
        if transform is None:
            return batch
        rng = generator(self.seed, "augment", self.round, client, step)
        return transform.train(batch, transform.draw(rng, len(batch["y"])))


def run_cohort(work: Work, state: SimulationState) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train every client of the cohort; return the sums and the clients' new states.

    Updates are summed a few at a time, so memory does not grow with the cohort.
    """
    params = state.params
    total = Aggregate.zero(params.numel(), params.dtype, params.device)
    changed: dict[int, Tensors] = {}
    together = max(1, SUMMED_BYTES // (params.numel() * params.element_size()))
    for at in range(0, len(work.cohort), together):
        clients = [int(client) for client in work.cohort[at : at + together]]
        part, states = run_clients(work, state, clients)
        total = total + part
        changed |= states
    return total, changed


def run_clients(
    work: Work, state: SimulationState, clients: list[int]
) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train some clients. One whose update is not finite keeps the state it had."""
    trained = [train_client(work, state, client) for client in clients]
    deltas = torch.stack([one.delta for one in trained])
    extras = {
        name: torch.stack([one.extras[name] for one in trained]) for name in trained[0].extras
    }
    weights = [work.weight(client) for client in clients] if work.weighting == "size" else None
    states: dict[int, Tensors] = {}
    if trained[0].state:
        good = usable(deltas, extras).tolist()
        states = {c: one.state for c, one, ok in zip(clients, trained, good, strict=True) if ok}
    return Aggregate.of(deltas, weights, extras), states


class Trained(NamedTuple):
    """What a client brings back: its update, what it adds to the sums, what it keeps."""

    delta: Tensor
    extras: Tensors
    state: Tensors


def train_client(work: Work, state: SimulationState, client: int) -> Trained:
    """Local training (eq. 2 and 3) of one client."""
    objective, rule, lr = work.task.objective, work.algorithm.client, work.lr
    mine = state.clients.get(client) or rule.init_local(state.params)
    params, buffers, steps = state.params, state.buffers, 0
    with seeded_torch(work.seed, "layers", work.round, client):
        for batch in work.batches(client):
            grad, buffers = objective.gradient(params, buffers, batch)
            grad = rule.correct(grad, params, state.params, state.shared, mine)
            params = local_step(params, grad, lr, work.local)
            steps += 1
    delta = state.params - params
    kept, extras = rule.finish(delta, steps * lr, state.shared, mine)
    if buffers.averaged.numel():
        extras = {**extras, "buffers": buffers.averaged}
    return Trained(delta, extras, kept)
