"""The state of a simulation: all that a run needs to go on from a round.

`Record`: what happened in a round, as plain numbers.

The server's part of a round: what a state becomes by the sums of its clients.

The simulator and servers of real clients take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.errors import DivergedError
from fedexp.objective import Buffers, changed_buffers
from fedexp.server import State as ServerState
from fedexp.tasks.task import Task


@dataclass(frozen=True, eq=False)
class SimulationState:
    """A snapshot after `round` rounds. Pass it as `start` to `simulate` to continue from it.

    Attributes:
        round: rounds done.
        steps: server steps taken; fewer than rounds where all clients of a round were dropped.
        params: the iterate that training continues from.
        buffers: its buffers.
        recent: the last iterates with their buffers, newest last, as many as the output averages.
        server: state of the server rule.
        shared: what the client rule keeps at the server (SCAFFOLD's c).
        clients: what it keeps at the clients that have taken part (SCAFFOLD's c_i).
    """

    round: int
    steps: int
    params: Tensor
    buffers: Buffers
    recent: tuple[tuple[Tensor, Buffers], ...]
    server: ServerState
    broadcast: Tensors
    clients: Mapping[int, Tensors]

    @classmethod
    def initial(cls, task: Task, algorithm: Algorithm, seed: int) -> SimulationState:
        return cls.of(*task.objective.initial(seed), algorithm)

    @classmethod
    def of(cls, params: Tensor, buffers: Buffers, algorithm: Algorithm) -> SimulationState:
        """The state before the first round of a model."""
        return cls(
            round=0,
            steps=0,
            params=params,
            buffers=buffers,
            recent=((params, buffers),),
            server=algorithm.server.init(params),
            broadcast=algorithm.client.init_broadcast(params),
            clients={},
        )

    def output(self) -> tuple[Tensor, Buffers]:
        """The model to evaluate and to keep: the mean of the recent iterates (sec. 5).

        It is computed beside the training, never fed back into it.
        """
        if len(self.recent) == 1:
            return self.recent[0]
        params = torch.stack([params for params, _ in self.recent]).mean(dim=0)
        averaged = torch.stack([buffers.averaged for _, buffers in self.recent]).mean(dim=0)
        return params, Buffers(averaged, self.buffers.kept)


@dataclass(frozen=True)
class Record:
    """One round. Losses and accuracies are those of the output model, None where not evaluated.

    Attributes:
        round: the round, counted from 1.
        server_lr: the server step size η_g that was taken; None when every client was dropped.
        local_lr: the client step size η_l of the round.
        clients: clients whose update entered the model.
        dropped: clients left out because their update was not finite.
        seconds: time of the round, without evaluation.
        metrics: further numbers of the server rule, e.g. `diversity` and `eps_share` of FedExP.
        engine: the engine that ran, e.g. "batched (layers)".
        state: everything needed to continue from here.
    """

    round: int
    server_lr: float | None
    local_lr: float
    clients: int
    dropped: int
    seconds: float
    train_loss: float | None = None
    train_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    state: SimulationState = field(repr=False, compare=False, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """The record as one flat JSON object; what is not finite or not there becomes null."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("metrics", "engine", "state")
        }
        return {name: _jsonable(value) for name, value in {**own, **self.metrics}.items()}


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    before = Model(state.params, state.buffers.averaged, state.server, state.broadcast)
    model, metrics = moved(algorithm, before, aggregate, total_weight)
    return server_update(state, model, algorithm), {n: float(value) for n, value in metrics.items()}


class Model(NamedTuple):
    """What the server moves: parameters, averaged buffers, and the states of its rules."""

    params: Tensor
    averaged: Tensor
    server: Tensors
    broadcast: Tensors


def moved(
    algorithm: Algorithm, model: Model, aggregate: Aggregate, total_weight: float
) -> tuple[Model, Tensors]:
    """The step as a function of tensors alone, and its metrics."""
    params, server, metrics = algorithm.server.step(model.params, aggregate, model.server)
    averaged = model.averaged
    if "buffers" in aggregate.extras:
        change = aggregate.mean_extra("buffers").to(averaged.dtype)
        averaged = changed_buffers(averaged, change)
    broadcast = algorithm.client.update_broadcast(model.broadcast, aggregate, total_weight)
    return Model(params, averaged, server, broadcast), metrics


def server_update(state: SimulationState, model: Model, algorithm: Algorithm) -> SimulationState:
    """The state with the model that a step has made of it."""
    buffers = Buffers(model.averaged, state.buffers.kept)
    return replace(
        state,
        steps=state.steps + 1,
        params=model.params,
        buffers=buffers,
        recent=_recent(state, model.params, buffers, algorithm.iterates),
        server=model.server,
        broadcast=model.broadcast,
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
