"""The batched engine: all clients of a cohort advance together, step by step.

It computes what the loop computes: the same clients, batches and augmentation, the same rules.
Clients with shorter batches are padded with rows that count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.client import Tensors
from fedexp.data.federation import Batch
from fedexp.engine.cohort_plan import cohort_batches, plan_cohort
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.local import local_step
from fedexp.objective import BatchedObjective, Buffers
from fedexp.seeding import seeded_torch

COHORT_BYTES = {"cpu": 2**28, "cuda": 2**34}  # models side by side; one, where one is larger


def run_cohort(work: Work, state: SimulationState) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train the cohort, as many clients at a time as fit; return sums and new client states.

    Where the memory of a device runs out, half as many are tried.
    """
    params = state.params
    total = Aggregate.zero(params.numel(), params.dtype, params.device)
    changed: dict[int, Tensors] = {}
    budget = COHORT_BYTES.get(params.device.type, 2**30)
    together = max(1, budget // (params.numel() * params.element_size()))
    waiting = [int(client) for client in work.cohort]
    while waiting:
        try:
            part, states = run_chunk(work, state, waiting[:together])
        except torch.OutOfMemoryError:
            if min(together, len(waiting)) == 1:
                raise
            together = max(1, min(together, len(waiting)) // 2)
            continue
        total, waiting = total + part, waiting[together:]
        changed |= states
    return total, changed


def run_chunk(
    work: Work, state: SimulationState, clients: Sequence[int]
) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train some clients as one program."""
    rule = work.algorithm.client
    mine = _stack([state.clients.get(c) or rule.init_local(state.params) for c in clients])
    params, buffers, steps = _train(work, state, clients, mine)
    deltas = state.params - params
    travel = torch.from_numpy(steps * work.lr)[:, None].to(deltas)
    kept, extras = rule.finish(deltas, travel, state.shared, mine)
    if buffers.averaged.numel():
        extras = {**extras, "buffers": buffers.averaged}
    weights = [work.weight(c) for c in clients] if work.weighting == "size" else None
    return Aggregate.of(deltas, weights, extras), _unstack(kept, clients, deltas, extras)


def _train(
    work: Work, state: SimulationState, clients: Sequence[int], mine: Tensors
) -> tuple[Tensor, Buffers, NDArray[np.int64]]:
    """Local training of all clients: their models [K, d], buffers, and steps."""
    objective, rule, lr = (
        cast(BatchedObjective, work.task.objective),
        work.algorithm.client,
        work.lr,
    )
    params = state.params.expand(len(clients), -1)
    buffers = Buffers(*(b.expand(len(clients), -1) for b in state.buffers))
    plan = plan_cohort(work, clients)
    with seeded_torch(work.seed, "layers", work.round, clients[0]):
        for lengths, (batch, valid) in zip(plan.lengths, cohort_batches(work, plan), strict=True):
            grads, after = _gradients(objective, params, buffers, batch, valid, lengths)
            grads = rule.correct(grads, params, state.params, state.shared, mine)
            moved = local_step(params, grads, lr, work.local)
            params, buffers = _only_active(lengths, (moved, after), (params, buffers))
    return params, buffers, plan.steps


def _gradients(
    objective: BatchedObjective,
    params: Tensor,
    buffers: Buffers,
    batch: Batch,
    valid: Tensor,
    lengths: NDArray[np.int64],
) -> tuple[Tensor, Buffers]:
    """Gradients of all clients; where examples mix in a model, padding must not be among them."""
    alike = np.unique(lengths)
    if len(alike) == 1 or not objective.mixes_examples:
        return objective.gradients(params, buffers, batch, valid)
    grads, after = torch.zeros_like(params), Buffers(*(b.clone() for b in buffers))
    for length in alike[alike > 0]:
        who = torch.from_numpy(np.flatnonzero(lengths == length)).to(params.device)
        some = {name: value[who, :length] for name, value in batch.items()}
        mine = Buffers(*(b[who] for b in buffers))
        grads[who], new = objective.gradients(params[who], mine, some, valid[who, :length])
        for target, value in zip(after, new, strict=True):
            target[who] = value
    return grads, after


def _only_active(
    lengths: NDArray[np.int64], new: tuple[Tensor, Buffers], old: tuple[Tensor, Buffers]
) -> tuple[Tensor, Buffers]:
    """Clients that have done all their steps stay where they are."""
    if lengths.all():
        return new
    active = torch.from_numpy(lengths > 0)[:, None].to(new[0].device)
    pairs = zip(new[1], old[1], strict=True)
    moved = torch.where(active, new[0], old[0])
    return moved, Buffers(*(torch.where(active, a, b) for a, b in pairs))


def _stack(states: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in states]) for name in states[0]}


def _unstack(
    kept: Tensors, clients: Sequence[int], deltas: Tensor, extras: Tensors
) -> dict[int, Tensors]:
    """The states of the clients whose updates count."""
    if not kept:
        return {}
    good = usable(deltas, extras).tolist()
    rows = [{name: value[k] for name, value in kept.items()} for k in range(len(clients))]
    return {c: row for c, row, ok in zip(clients, rows, good, strict=True) if ok}
