"""The loop: one client after another. The reference that faster engines must equal.

A round is `Loop`: `train` each client of the cohort, and add what it sends to the sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedexp.client import LinearCorrection
from fedexp.engine.base import Sums, Trained, add_sums, client_loss, cohort_parts, sum_trained
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.local import (
    LocalTraining,
    TorchOptimizer,
    init_moments,
    kept_state,
    local_step,
    local_step_in_parts,
    optimizer_step,
    split_client_state,
)
from fedexp.objective import ModuleObjective, Objective, buffer_changes
from fedexp.seeding import seeded_torch

LARGE_BYTES = 2**20  # parameters that do not fit a core's cache with their gradient


class Loop:
    """Trains one client after another."""

    name = "loop"

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        sums: Sums | None = None
        for clients in cohort_parts(work, state):
            trained = []
            for client in clients:
                with seeded_torch(work.seed, "layers", work.round, client):  # dropout draws from it
                    trained.append(train(work, state, client, work.task.objective))
            part = sum_trained(work, clients, trained)
            sums = part if sums is None else add_sums(sums, part)
        assert sums is not None
        return sums


def train(
    work: Work,
    state: SimulationState,
    client: int,
    objective: Objective,
    out: Tensor | None = None,
) -> Trained:
    """Train one client (eq. 2 and 3).

    The local optimiser's state is at zero before it, unless it is kept. The update is written to
    `out`, if given.
    """
    rule, local, lr = work.algorithm.client, work.local, work.lr
    stored = state.clients.get(client) or work.init_client_state(state.params)
    client_state, kept = split_client_state(stored)
    # a copy: the steps write to it, and so do some layers (an embedding with max_norm)
    params, buffers, steps = state.params.clone(), state.buffers, 0
    moments, taken = kept or init_moments(params, local), int(kept.get("steps", 0))
    make = local.optimizer
    optimizer = TorchOptimizer(make, params, lr) if callable(make) else None
    factors = work.step_factors(int(work.task.train.sizes[client]))
    parts = _parts_objective(work, params, objective)
    correction = rule.linear_correction(state.broadcast, client_state) if parts else None
    for batch in work.batches(client):
        step_lr, steps = lr * factors[steps], steps + 1
        if parts is not None and correction is not None:
            grads, buffers = parts.gradient_parts(params, buffers, batch)
            _step_in_parts(params, grads, state.params, correction, step_lr, local)
            continue
        grad, buffers = objective.gradient(params, buffers, batch)
        grad = rule.correct(grad, params, state.params, state.broadcast, client_state)
        if local.is_sgd:
            apart = grad.data_ptr() != params.data_ptr()  # the gradient of ||w||²/2 may be w itself
            params = local_step(params, grad, step_lr, local, in_place=apart)
        elif optimizer is not None:
            optimizer.step(params, grad, factors[steps - 1], local)
        else:
            params, moments = optimizer_step(params, grad, moments, taken + steps, step_lr, local)
    delta = torch.sub(state.params, params, out=out)
    total_lr = math.fsum(factors) * lr
    new_state, extras = rule.end_round(delta, total_lr, state.broadcast, client_state)
    if kept:
        new_state = {**new_state, **kept_state({**moments, "steps": kept["steps"] + steps})}
    if rule.needs_loss:
        loss = client_loss(work.task, client, objective, params, buffers)
        extras = {**extras, **rule.loss_extras(loss, delta)}
    if buffers.averaged.numel():
        changes = buffer_changes(buffers.averaged, state.buffers.averaged)
        extras = {**extras, "buffers": changes}
    return Trained(delta, extras, new_state, rule.weight_factor(total_lr))


def _parts_objective(work: Work, params: Tensor, objective: Objective) -> ModuleObjective | None:
    """Return the objective if it should take steps of SGD tensor by tensor: large, on a CPU."""
    suits = (
        params.device.type == "cpu"
        and params.nbytes >= LARGE_BYTES
        and work.local.is_sgd
        and work.algorithm.client.is_linear
    )
    if suits and isinstance(objective, ModuleObjective):
        is_overridden = type(objective).gradient is not ModuleObjective.gradient
        return None if is_overridden else objective
    return None


def _step_in_parts(
    params: Tensor,
    grads: list[Tensor],
    start: Tensor,
    correction: LinearCorrection,
    lr: float,
    local: LocalTraining,
) -> None:
    """Correct the parts of a gradient and take a step in place, with the bits of `local_step`."""
    sizes = [len(grad) for grad in grads]
    own, starts = params.split(sizes), start.split(sizes)
    prox, offset = correction
    offsets = [None] * len(sizes) if offset is None else offset.expand_as(params).split(sizes)
    grads = [
        LinearCorrection(prox, part).apply(grad, now, before)
        for grad, now, before, part in zip(grads, own, starts, offsets, strict=True)
    ]
    local_step_in_parts(own, grads, lr, local)
