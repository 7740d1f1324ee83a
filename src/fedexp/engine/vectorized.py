"""The batched engine: all clients of a cohort advance together, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.client import Tensors
from fedexp.data.federation import Batch
from fedexp.engine.plan import plan_batches
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.local import local_step
from fedexp.objective import Buffers
from fedexp.seeding import seeded_torch


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of K clients over S steps, padded to the longest.

    Attributes:
        rows: rows of the federation's fields, [S, K, B]; padding repeats a client's first row.
        lengths: real examples in each batch, [S, K]; 0 where a client has no more steps.
        draws: random numbers of the transform, [S, K, B, ...], or None.
    """

    rows: Tensor
    lengths: Tensor
    draws: Tensor | None


def plan_cohort(work: Work, clients: Sequence[int]) -> Plan:
    """Every client's batches, exactly those that the loop would use."""
    sizes, offsets = work.task.train.sizes, work.task.train.offsets
    planned = [plan_batches(work.seed, work.round, c, int(sizes[c]), work.local) for c in clients]
    steps = max(map(len, planned))
    widest = max(len(batch) for batches in planned for batch in batches)
    rows = np.empty((steps, len(clients), widest), dtype=np.int64)
    lengths = np.zeros((steps, len(clients)), dtype=np.int64)
    for k, (client, batches) in enumerate(zip(clients, planned, strict=True)):
        rows[:, k] = offsets[client]
        for s, batch in enumerate(batches):
            rows[s, k, : len(batch)] = batch + offsets[client]
            lengths[s, k] = len(batch)
    draws = _draws(work, clients, lengths, widest)
    return Plan(torch.from_numpy(rows), torch.from_numpy(lengths), draws)


def _draws(
    work: Work, clients: Sequence[int], lengths: NDArray[np.int64], widest: int
) -> Tensor | None:
    """The transform's random numbers, drawn client by client as the loop draws them."""
    transform, drawn = work.task.transform, None
    if transform is None:
        return None
    for k, client in enumerate(clients):
        rng = work.augmentation(client)
        for s, length in enumerate(lengths[:, k]):
            values: Any = transform.draw(rng, int(length)) if length else None
            if values is None:
                continue
            if drawn is None:
                drawn = np.zeros((*lengths.shape, widest, *values.shape[1:]), values.dtype)
            drawn[s, k, :length] = values
    return None if drawn is None else torch.from_numpy(drawn)


def run_cohort(work: Work, state: SimulationState) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train the cohort in chunks; return the sums and the clients' new states."""
    params = state.params
    total = Aggregate.zero(params.numel(), params.dtype, params.device)
    changed: dict[int, Tensors] = {}
    for at in range(0, len(work.cohort), CHUNK):
        clients = [int(client) for client in work.cohort[at : at + CHUNK]]
        part, states = run_chunk(work, state, clients)
        total = total + part
        changed |= states
    return total, changed


CHUNK = 64


def run_chunk(
    work: Work, state: SimulationState, clients: Sequence[int]
) -> tuple[Aggregate, dict[int, Tensors]]:
    """Train some clients as one program."""
    rule, lr = work.algorithm.client, work.lr
    mine = _stack([state.clients.get(c) or rule.init_local(state.params) for c in clients])
    params = state.params.expand(len(clients), -1)
    buffers = Buffers(*(b.expand(len(clients), -1) for b in state.buffers))
    plan = plan_cohort(work, clients)
    with seeded_torch(work.seed, "layers", work.round, clients[0]):
        for batch, valid in _batches(work, plan):
            grads, after = work.task.objective.gradients(params, buffers, batch, valid)
            grads = rule.correct(grads, params, state.params, state.shared, mine)
            moved = local_step(params, grads, lr, work.local)
            params, buffers = _only_active(valid, (moved, after), (params, buffers))
    deltas = state.params - params
    steps = (plan.lengths > 0).sum(dim=0)[:, None].to(deltas.device)
    kept, extras = rule.finish(deltas, steps * lr, state.shared, mine)
    if buffers.averaged.numel():
        extras = {**extras, "buffers": buffers.averaged}
    weights = [work.weight(c) for c in clients] if work.weighting == "size" else None
    return Aggregate.of(deltas, weights, extras), _unstack(kept, clients, deltas, extras)


def _batches(work: Work, plan: Plan) -> Iterator[tuple[Batch, Tensor]]:
    """The batches of all clients, step by step, and which of their rows are real."""
    fields, transform = work.task.train.fields, work.task.transform
    width = torch.arange(plan.rows.shape[2])
    for s, rows in enumerate(plan.rows):
        batch: Batch = {name: value[rows] for name, value in fields.items()}
        if transform is not None:
            batch = transform.train(batch, None if plan.draws is None else plan.draws[s])
        yield batch, (width < plan.lengths[s][:, None]).to(torch.float32)


def _only_active(
    valid: Tensor, new: tuple[Tensor, Buffers], old: tuple[Tensor, Buffers]
) -> tuple[Tensor, Buffers]:
    """Clients that have done all their steps stay where they are."""
    active = valid[:, :1] > 0
    if bool(active.all()):
        return new
    params = torch.where(active, new[0], old[0])
    pairs = zip(new[1], old[1], strict=True)
    return params, Buffers(*(torch.where(active, a, b) for a, b in pairs))


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
