"""The plain engine: one client after another. The reference that faster engines must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.client import Tensors
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.local import local_step
from fedexp.objective import Objective, buffer_changes
from fedexp.seeding import seeded_torch

SUMMED_BYTES = 32 * 2**20  # updates held at a time; one, where one is larger

Sums = tuple[Aggregate, dict[int, Tensors]]
Run = Callable[[Work, SimulationState], Sums]


class Engine(Protocol):
    """Trains the clients of a round.

    Attributes:
        name: what `engine=` calls it, and in brackets which of its implementations runs.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        """Train every client of the cohort; return the sums and the clients' new states."""
        ...


class Loop:
    """The engine."""

    name = "loop"

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        return sum_in_parts(work, state, run_clients)


def sum_in_parts(
    work: Work,
    state: SimulationState,
    run_clients: Callable[[Work, SimulationState, list[int]], Sums],
    least: int = 1,
) -> Sums:
    """Sum updates a few times `least` at a time: memory does not grow with the cohort."""
    clients: list[int] = work.cohort.tolist()
    together = SUMMED_BYTES // (state.params.numel() * state.params.element_size())
    together = max(least, together - together % least)
    total, changed = run_clients(work, state, clients[:together])
    for at in range(together, len(clients), together):
        part, states = run_clients(work, state, clients[at : at + together])
        total = total + part
        changed |= states
    return total, changed


def run_clients(work: Work, state: SimulationState, clients: list[int]) -> Sums:
    """Train some clients, one after another."""
    return sum_trained(work, clients, [train_client(work, state, client) for client in clients])


def sum_trained(work: Work, clients: list[int], trained: list[Trained]) -> Sums:
    """The sums of trained clients. One whose update is not finite keeps the state it had."""
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


def sum_updates(
    work: Work,
    state: SimulationState,
    clients: list[int],
    deltas: Tensor,
    total_lr: Tensor | float,
    client_state: Tensors,
) -> Sums:
    """The same for clients that were trained side by side: updates [K, d], states [K, d]."""
    kept, extras = work.algorithm.client.end_round(deltas, total_lr, state.broadcast, client_state)
    weights = [work.weight(client) for client in clients] if work.weighting == "size" else None
    states: dict[int, Tensors] = {}
    if kept:
        good = usable(deltas, extras).tolist()
        # copies: views would keep the states of all the cohort alive
        rows = [{name: value[k].clone() for name, value in kept.items()} for k in range(len(good))]
        states = {c: row for c, row, ok in zip(clients, rows, good, strict=True) if ok}
    return Aggregate.of(deltas, weights, extras), states


class Trained(NamedTuple):
    """What a client brings back: its update, what it adds to the sums, what it keeps."""

    delta: Tensor
    extras: Tensors
    state: Tensors


def train_client(work: Work, state: SimulationState, client: int) -> Trained:
    """Local training of one client, whose layers draw from torch's generator."""
    with seeded_torch(work.seed, "layers", work.round, client):
        return train(work, state, client, work.task.objective)


def train(work: Work, state: SimulationState, client: int, objective: Objective) -> Trained:
    """Local training (eq. 2 and 3) of one client."""
    rule, lr = work.algorithm.client, work.lr
    client_state = state.clients.get(client) or rule.init_client_state(state.params)
    # a copy: the steps write to it, and so do some layers (an embedding with max_norm)
    params, buffers, steps = state.params.clone(), state.buffers, 0
    for batch in work.batches(client):
        grad, buffers = objective.gradient(params, buffers, batch)
        grad = rule.correct(grad, params, state.params, state.broadcast, client_state)
        apart = grad.data_ptr() != params.data_ptr()  # the gradient of ||w||²/2 may be w itself
        params = local_step(params, grad, lr, work.local, in_place=apart)
        steps += 1
    delta = state.params - params
    kept, extras = rule.end_round(delta, steps * lr, state.broadcast, client_state)
    if buffers.averaged.numel():
        changes = buffer_changes(buffers.averaged, state.buffers.averaged)
        extras = {**extras, "buffers": changes}
    return Trained(delta, extras, kept)
