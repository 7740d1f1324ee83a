"""Local training in one go, where the steps of a client on all of its data are a linear iteration.

It gives what the loop gives, up to rounding, without taking the steps one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fedexp.client import ClientRule, LinearCorrection
from fedexp.engine.client_store import ClientStates
from fedexp.engine.loop import Sums, sum_in_parts, sum_updates
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.objective import LeastSquares
from fedexp.objective.least_squares import LinearSteps
from fedexp.tasks.task import Task

RUNS_KEPT = 4096  # whose eigenvectors are remembered; they take less than the clients' data
MOST_DIRECTIONS = 4  # for each local step: finding more eigenvalues takes longer than the steps


def suits_quadratic(work: Work, state: SimulationState) -> bool:
    """Whether this engine suits the work: least squares on whole batches, a linear correction."""
    local, objective = work.local, work.task.objective
    if not isinstance(objective, LeastSquares) or state.params.device.type != "cpu":
        return False
    largest = int(work.task.train.sizes[work.cohort].max())
    return (
        local.batch_size is None
        and local.clip_norm is None
        and work.task.transform is None
        and type(work.algorithm.client).correct is ClientRule.correct
        and min(largest, state.params.numel()) <= MOST_DIRECTIONS * local.steps_for(largest)
    )


class Quadratic:
    """The engine; it remembers the eigenvectors of the clients' data."""

    name = "quadratic"

    def __init__(self) -> None:
        self._steps = lru_cache(maxsize=RUNS_KEPT)(_steps)

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        return sum_in_parts(work, state, self.run_clients)

    def run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        """Train some clients. One whose update is not finite keeps the state it had."""
        rule, start = work.algorithm.client, state.params
        fresh = rule.init_client_state(start)
        client_state = ClientStates.of(state.clients).stacked(clients, fresh)
        correction = _with_decay(
            rule.linear_correction(state.broadcast, client_state), work.local.weight_decay, start
        )
        steps = work.local.steps_for(1)  # the same for all, since a batch is all of the data
        parts = [
            self._steps(work.task, run).updates(start, steps, work.lr, _part(correction, own))
            for own, run in _neighbours(work, clients)
        ]
        deltas = torch.cat(parts) if len(parts) > 1 else parts[0]
        return sum_updates(work, state, clients, deltas, steps * work.lr, client_state)


def _steps(task: Task, clients: range) -> LinearSteps:
    """The steps of neighbours, whose rows lie side by side: nothing is copied."""
    assert isinstance(task.objective, LeastSquares)
    rows = slice(int(task.train.offsets[clients[0]]), int(task.train.offsets[clients[-1] + 1]))
    each = (len(clients), -1)
    return task.objective.linear_steps(
        {name: value[rows].unflatten(0, each) for name, value in task.train.fields.items()}
    )


def _neighbours(work: Work, clients: list[int]) -> Iterator[tuple[slice, range]]:
    """Runs of consecutive clients of one size: their places among `clients`, and themselves."""
    sizes, first = work.task.train.sizes[clients].tolist(), 0
    for at in range(1, len(clients) + 1):
        here = (clients[first] + at - first, sizes[first])
        if at == len(clients) or (clients[at], sizes[at]) != here:
            yield slice(first, at), range(clients[first], here[0])
            first = at


def _with_decay(correction: LinearCorrection, decay: float, start: Tensor) -> LinearCorrection:
    """Weight decay λ w is λ (w - w⁰) + λ w⁰."""
    if not decay:
        return correction
    offset = decay * start if correction.offset is None else correction.offset + decay * start
    return LinearCorrection(correction.prox + decay, offset)


def _part(correction: LinearCorrection, own: slice) -> LinearCorrection:
    """The drift of some clients; one without a dimension of clients is common to all."""
    if correction.offset is None or correction.offset.ndim == 1:
        return correction
    return correction._replace(offset=correction.offset[own])
