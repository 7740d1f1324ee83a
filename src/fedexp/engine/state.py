"""The state of a simulation, the record of a round, and the server step that leads from one state
to the next. The simulator and servers of real clients take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.errors import DivergedError, UsageError
from fedexp.objective import Buffers, LoadableObjective, changed_buffers
from fedexp.objective.base import version
from fedexp.precision import widest
from fedexp.server import State as ServerState
from fedexp.tasks.task import Task

if TYPE_CHECKING:  # only private runs import them
    from fedexp.privacy import Releases

EVALUATED = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")  # fields of a record


@dataclass(frozen=True, eq=False, repr=False)
class SimulationState:
    """A snapshot after `round` rounds. Pass it as `start` to `simulate` to continue from it.

    Attributes:
        round: rounds done.
        steps: server steps taken; fewer than rounds where all clients of a round were dropped.
        params: the iterate that training continues from, one flat vector (`Task.to_state_dict`).
        buffers: its buffers.
        recent: the last iterates with their buffers, newest last, as many as the output averages.
        server: state of the server rule.
        broadcast: state of the client rule at the server (SCAFFOLD's c).
        clients: client state of those that have taken part (SCAFFOLD's c_i).
        releases: what was released with privacy so far, with counts; None after a step without.
    """

    round: int
    steps: int
    params: Tensor
    buffers: Buffers
    recent: tuple[tuple[Tensor, Buffers], ...]
    server: ServerState
    broadcast: Tensors
    clients: Mapping[int, Tensors]
    releases: Releases = field(default_factory=dict)

    def __repr__(self) -> str:
        states = f", {len(self.clients):,} client states" if self.clients else ""
        return f"SimulationState(round {self.round}, {self.params.numel():,} parameters{states})"

    @classmethod
    def initial(cls, task: Task, algorithm: Algorithm, seed: int) -> SimulationState:
        """Return the state before the first round of a task."""
        return cls.of(*task.objective.initial(seed), algorithm)

    @classmethod
    def of(cls, params: Tensor, buffers: Buffers, algorithm: Algorithm) -> SimulationState:
        """Return the state before the first round of a model."""
        return cls(
            round=0,
            steps=0,
            params=params,
            buffers=buffers,
            recent=((params, buffers),),
            server=algorithm.init(params, bool(buffers.averaged.numel())),
            broadcast=algorithm.client.init_broadcast(params),
            clients={},
        )

    def output(self) -> tuple[Tensor, Buffers]:
        """Return the output model: the mean of the recent iterates (sec. 5).

        It is computed beside the training and never fed back into it.
        """
        if len(self.recent) == 1:
            return self.recent[0]
        params = torch.stack([params for params, _ in self.recent]).mean(dim=0)
        averaged = torch.stack([buffers.averaged for _, buffers in self.recent]).mean(dim=0)
        return params, Buffers(averaged, self.buffers.kept)


@dataclass(frozen=True)
class EngineChoice:
    """Which engine trains a run, and why.

    Attributes:
        name: exactly what runs: "loop", "threads", "batched", "dense" or "quadratic".
        reason: why, in one line.
        implementation: of the batched engine: "layers", "vmap" or "vmap, not padded"; else None.
        cuda_graph: what is replayed as a CUDA graph: "round", "local training", or None.

    >>> str(EngineChoice("batched", "asked for by name", "layers"))
    'batched (layers)'
    """

    name: str
    reason: str
    implementation: str | None = None
    cuda_graph: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.implementation})" if self.implementation else self.name


@dataclass(frozen=True, repr=False)
class Record:
    """One round. Losses and accuracies are those of the output model, None where not evaluated.

    Attributes:
        round: the round, counted from 1.
        server_lr: the server step size η_g that was taken; None when every client was dropped.
        local_lr: the client step size η_l of the round.
        clients: clients whose update entered the model.
        dropped: clients left out because their update was not finite.
        seconds: time of the round, without evaluation.
        metrics: further numbers: of the server rule, e.g. `diversity` and `eps_share` of FedExP,
            and of the task, e.g. `test_f1`.
        engine_choice: the engine that ran, and why; None where the caller gave one to `run_round`.
        bytes_up: bytes that all clients of the cohort send: trained parameters, floating-point
            buffers and the client rule's extras, in their types; those of dropped clients too. None
            in a record of `run_round`, as is `bytes_down`.
        bytes_down: bytes that the server sends to them: trained parameters, all buffers and the
            broadcast state. Frozen parameters are not sent, and a few numbers per client (the size
            of its data, the round) are not counted.
        state: everything needed to continue from here.
        task: the task, on the device of the run.
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
    engine_choice: EngineChoice | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    state: SimulationState = field(repr=False, compare=False, kw_only=True)
    task: Task | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ("server_lr", *EVALUATED)}
        values |= {n: v for n, v in self.metrics.items() if n.startswith(("train_", "test_"))}
        numbers = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        return f"Record({', '.join([f'round {self.round}', *numbers])})"

    def model(self) -> nn.Module:
        """Return the output model as a new module, on the CPU, contiguous, in evaluation mode."""
        objective = None if self.task is None else self.task.objective
        if not isinstance(objective, LoadableObjective):
            raise UsageError(
                "there is no torch module for this objective; its weights are record.state.output()"
            )
        return objective.load(*self.state.output()).cpu().eval()

    def evaluate_clients(self) -> dict[str, NDArray[np.float64]]:
        """Return loss and accuracy of the output model for each client, e.g. `train_accuracy`."""
        if self.task is None:
            raise UsageError("this record has no task; use task.evaluate_clients(*state.output())")
        values = self.task.evaluate_clients(*self.state.output())
        return {name: value.numpy() for name, value in values.items()}

    @property
    def engine(self) -> str:
        """The engine that ran, e.g. "batched (layers)"; "" where it is not recorded."""
        return str(self.engine_choice or "")

    def to_json(self) -> dict[str, Any]:
        """Return one flat JSON object; values that are not finite or not known are null."""
        left_out = ("metrics", "engine_choice", "state", "task")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**values, **self.metrics}.items()
        }


def server_step(
    algorithm: Algorithm,
    state: SimulationState,
    aggregate: Aggregate,
    total_weight: float,
    factor: float = 1.0,
) -> tuple[SimulationState, dict[str, float]]:
    """Return the state after a server step, and its metrics.

    Rules update the parameters; averaged buffers change by the mean of their changes, integer
    buffers not at all.

    Args:
        algorithm: the rules.
        state: the state before the step; its round and client states are left to the caller.
        aggregate: the sums of at least one client.
        total_weight: the weight of all clients, in this round or not.
        factor: of the server schedule in this round.
    """
    before = ServerModel(state.params, state.buffers.averaged, state.server, state.broadcast)
    after, metrics = model_step(algorithm, before, aggregate, total_weight, factor)
    return with_model(state, after, algorithm), {n: float(value) for n, value in metrics.items()}


class ServerModel(NamedTuple):
    """The tensors that a server step changes: parameters, averaged buffers, states of the rules."""

    params: Tensor
    averaged: Tensor
    server: Tensors
    broadcast: Tensors


def model_step(
    algorithm: Algorithm,
    model: ServerModel,
    aggregate: Aggregate,
    total_weight: float,
    factor: float = 1.0,
) -> tuple[ServerModel, Tensors]:
    """Return the model after a server step, and its metrics: a function of tensors alone.

    What rules return was checked before the first round (`contract.probe`).
    """
    before = _versions(model)
    params, server, metrics = algorithm.step(model.params, aggregate, model.server, factor)
    _check_versions(algorithm.server, "step", model, before)
    averaged = model.averaged
    if "buffers" in aggregate.extras:
        change = aggregate.mean_extra("buffers").to(averaged.dtype)
        averaged = changed_buffers(averaged, change)
    broadcast = algorithm.client.update_broadcast(model.broadcast, aggregate, total_weight)
    _check_versions(algorithm.client, "update_broadcast", model, before)
    return ServerModel(params, averaged, server, broadcast), metrics


def _versions(model: ServerModel) -> list[int]:
    """Return how often each tensor of a model was written to."""
    values = (model.params, model.averaged, *model.server.values(), *model.broadcast.values())
    return [version(value) for value in values if isinstance(value, Tensor)]


def _check_versions(rule: Any, method: str, model: ServerModel, before: list[int]) -> None:
    """Refuse a rule that writes to the model in its arguments, which earlier records share."""
    if _versions(model) != before:
        raise UsageError(
            f"{method} of {type(rule).__name__} changes its arguments in place; return new "
            "tensors, e.g. params - aggregate.mean instead of params -= aggregate.mean"
        )


def with_model(state: SimulationState, model: ServerModel, algorithm: Algorithm) -> SimulationState:
    """Return the state with the model after one more server step, taken without privacy."""
    # the untrained initial model is not an iterate (docs/paper.md#first-output-model)
    before = state.recent if state.steps else ()
    buffers = Buffers(model.averaged, state.buffers.kept)
    return replace(
        state,
        steps=state.steps + 1,
        params=model.params,
        buffers=buffers,
        recent=(*before, (model.params, buffers))[-algorithm.iterates :],
        server=model.server,
        broadcast=model.broadcast,
        releases=None,
    )


def largest_norm(dtype: torch.dtype) -> float:
    """Return the norm of a model from which on squares of its updates may overflow."""
    return max(torch.finfo(kind).max for kind in (dtype, torch.float32)) ** 0.25


def check_range(state: SimulationState) -> None:
    """Raise `DivergedError` before squares overflow, after which every update is dropped."""
    params = state.params
    norm = torch.linalg.vector_norm(params, dtype=widest(params.device)).item()
    if not norm < largest_norm(params.dtype):
        raise DivergedError(state.round, f"the norm of the model is {norm:.1e}")
