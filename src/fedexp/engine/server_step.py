"""The server's part of a round: what a state becomes by the sums of its clients.

The simulator and servers of real clients take the same step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.engine.state import SimulationState
from fedexp.errors import DivergedError
from fedexp.objective import Buffers, changed_buffers


def server_step(
    algorithm: Algorithm, state: SimulationState, aggregate: Aggregate, total_weight: float
) -> tuple[SimulationState, dict[str, float]]:
    """Rules move the parameters; buffers move by the mean of their changes, integers not at all.

    Args:
        algorithm: whose rules take the step.
        state: the state before it; its round is left to the caller, and so are clients' states.
        aggregate: the sums of at least one client.
        total_weight: the weight of all clients there are, in this round or not.
    """
    before = Model(state.params, state.buffers.averaged, state.server, state.shared)
    model, metrics = moved(algorithm, before, aggregate, total_weight)
    return advanced(state, model, algorithm), {n: float(value) for n, value in metrics.items()}


class Model(NamedTuple):
    """What the server moves: parameters, averaged buffers, and the states of its rules."""

    params: Tensor
    averaged: Tensor
    server: Tensors
    shared: Tensors


def moved(
    algorithm: Algorithm, model: Model, aggregate: Aggregate, total_weight: float
) -> tuple[Model, Tensors]:
    """The step as a function of tensors alone, and its metrics."""
    params, server, metrics = algorithm.server.step(model.params, aggregate, model.server)
    averaged = model.averaged
    if "buffers" in aggregate.extras:
        change = aggregate.mean_extra("buffers").to(averaged.dtype)
        averaged = changed_buffers(averaged, change)
    shared = algorithm.client.update_shared(model.shared, aggregate, total_weight)
    return Model(params, averaged, server, shared), metrics


def advanced(state: SimulationState, model: Model, algorithm: Algorithm) -> SimulationState:
    """The state with the model that a step has made of it."""
    buffers = Buffers(model.averaged, state.buffers.kept)
    return replace(
        state,
        steps=state.steps + 1,
        params=model.params,
        buffers=buffers,
        recent=_recent(state, model.params, buffers, algorithm.iterates),
        server=model.server,
        shared=model.shared,
    )


def check_range(state: SimulationState) -> None:
    """Stop before squares overflow: from there every update is dropped and nothing moves."""
    norm = torch.linalg.vector_norm(state.params, dtype=torch.float64).item()
    largest = max(torch.finfo(kind).max for kind in (state.params.dtype, torch.float32))
    if not norm < largest**0.25:
        raise DivergedError(state.round, f"the norm of the model is {norm:.1e}")


def _recent(
    state: SimulationState, params: Tensor, buffers: Buffers, iterates: int
) -> tuple[tuple[Tensor, Buffers], ...]:
    """The last iterates; the untrained first model is not one of them (audit A8.15)."""
    before = state.recent if state.steps else ()
    return (*before, (params, buffers))[-iterates:]
