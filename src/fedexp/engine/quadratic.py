"""The quadratic engine: local training on least squares in closed form.

The steps of a client on all of its data are a linear iteration
(`fedexp.objective.least_squares.LinearSteps`), so the loop's result follows, up to rounding,
without taking the steps one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial, reduce

import torch
from torch import Tensor

from fedexp.client import LinearCorrection
from fedexp.engine.base import Sums, add_sums, cohort_parts, part_of, stacked_states, sum_updates
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.objective import QuadraticObjective
from fedexp.objective.least_squares import LinearSteps
from fedexp.tasks.task import Task

CACHED_RUNS = 4096  # runs of clients with cached eigenvectors, which take less than their data
MOST_DIRECTIONS = 4  # per local step: finding more eigenvalues takes longer than the steps


def suits_quadratic(work: Work, state: SimulationState) -> bool:
    """Return whether this engine suits: plain SGD on whole batches, no clipping, a linear rule."""
    local, objective = work.local, work.task.objective
    if not isinstance(objective, QuadraticObjective) or state.params.device.type != "cpu":
        return False
    largest = int(work.task.train.sizes[work.cohort].max())
    return (
        local.is_plain_sgd
        and local.batch_size is None
        and local.clip_norm is None
        and work.task.transform is None
        and work.algorithm.client.is_linear
        and min(largest, state.params.numel()) <= MOST_DIRECTIONS * local.steps_for(largest)
    )


class Quadratic:
    """Trains clients in closed form; caches the eigenvectors of their data."""

    name = "quadratic"

    def __init__(self) -> None:
        self._steps = lru_cache(maxsize=CACHED_RUNS)(_steps)

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        parts = cohort_parts(work, state)
        return reduce(add_sums, map(partial(self.run_clients, work, state), parts))

    def run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        """Train some clients; one whose update is not finite changes no state."""
        rule, start = work.algorithm.client, state.params
        client_state = stacked_states(work, state, clients)
        correction = _with_decay(
            rule.linear_correction(state.broadcast, client_state), work.local.weight_decay, start
        )
        steps = work.local.steps_for(1)  # the same for all, since a batch is all of the data
        parts = [
            self._steps(work.task, run).updates(start, steps, work.lr, part_of(correction, part))
            for part, run in _neighbours(work, clients)
        ]
        deltas = torch.cat(parts) if len(parts) > 1 else parts[0]
        return sum_updates(work, state, clients, deltas, steps * work.lr, client_state)


def _steps(task: Task, clients: range) -> LinearSteps:
    """Return the steps of consecutive clients, whose rows are adjacent: nothing is copied."""
    assert isinstance(task.objective, QuadraticObjective)
    rows = slice(int(task.train.offsets[clients[0]]), int(task.train.offsets[clients[-1] + 1]))
    shape = (len(clients), -1)
    return task.objective.linear_steps(
        {name: value[rows].unflatten(0, shape) for name, value in task.train.fields.items()}
    )


def _neighbours(work: Work, clients: list[int]) -> Iterator[tuple[slice, range]]:
    """Yield runs of consecutive clients of one size: positions in `clients`, and the clients."""
    sizes, first = work.task.train.sizes[clients].tolist(), 0
    for at in range(1, len(clients) + 1):
        here = (clients[first] + at - first, sizes[first])
        if at == len(clients) or (clients[at], sizes[at]) != here:
            yield slice(first, at), range(clients[first], here[0])
            first = at


def _with_decay(correction: LinearCorrection, decay: float, start: Tensor) -> LinearCorrection:
    """Return the correction with weight decay: λ w is λ (w - w⁰) + λ w⁰."""
    if not decay:
        return correction
    offset = decay * start if correction.offset is None else correction.offset + decay * start
    return LinearCorrection(correction.prox + decay, offset)
