"""The dense engine: dense networks on a CPU, many clients at a time, without autograd.

It gives what the loop gives, up to rounding. Clients are taken in blocks whose weights and
activations stay in the cache of a core; the blocks do not depend on the threads that work on them,
so neither do the numbers. The arithmetic is `fedexp.objective.dense`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.client import LinearCorrection
from fedexp.engine.base import (
    Pool,
    Sums,
    add_sums,
    cohort_parts,
    part_of,
    stacked_states,
    sum_updates,
)
from fedexp.engine.plan import Numbers, Work, batch_key, client_steps, host_rows, plan_cohort
from fedexp.engine.state import SimulationState
from fedexp.objective import DenseObjective
from fedexp.objective.dense import DenseNetwork, DenseStep

BLOCK_BYTES = 2**20  # weights and activations of clients that are trained together
MOST_PADDING = 2  # how many times wider a block's widest batch may be than its narrowest


def dense_network_of(work: Work, state: SimulationState) -> DenseNetwork | None:
    """Return the network where this engine suits: a dense classifier, plain SGD, a linear rule."""
    objective, train = work.task.objective, work.task.train
    if not isinstance(objective, DenseObjective) or state.params.device.type != "cpu":
        return None
    network = objective.dense_network()
    linear = work.algorithm.client.is_linear and work.local.is_plain_sgd
    if network is None or not linear:
        return None
    batch = train.batch(int(work.cohort[0]), np.arange(1))
    batch = batch if work.task.transform is None else work.task.transform.evaluate(batch)
    x, y = batch[network.x], batch[network.y]
    row = x.flatten(1) if network.flattens else x
    fits = row.shape == (1, network.layers[0].inputs) and x.dtype == state.params.dtype
    return network if fits and y.shape == (1,) and y.dtype == torch.int64 else None


class Dense:
    """Trains blocks of clients, on as many threads as torch would use for one operation."""

    name = "dense"

    def __init__(self, network: DenseNetwork) -> None:
        self.network, self.pool = network, Pool()

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        parts = cohort_parts(work, state, least=self.pool.count)
        return reduce(add_sums, map(partial(self._run_clients, work, state), parts))

    def _run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        rule, start = work.algorithm.client, state.params
        chosen, client_state = np.asarray(clients), stacked_states(work, state, clients)
        correction = rule.linear_correction(state.broadcast, client_state)
        params = start.new_empty(len(clients), len(start))
        train = partial(self._train_block, work, start, chosen, correction, params)
        self.pool.map(train, self.blocks(work, start, chosen))
        steps = client_steps(work.task.train.sizes[chosen], work.local)
        total_lr = torch.from_numpy(steps * work.lr)[:, None].to(params.dtype)
        return sum_updates(work, state, clients, start - params, total_lr, client_state)

    def blocks(self, work: Work, params: Tensor, clients: Numbers) -> list[Numbers]:
        """Return the positions of clients that are trained together, most work first."""
        sizes = work.task.train.sizes[clients]
        widths = np.minimum(sizes, work.local.batch_size or sizes)
        order = np.lexsort((-widths, -client_steps(sizes, work.local)))
        blocks, bytes_left, widest = [], 0, 0
        for position in order:
            width = int(widths[position])
            bytes = params.element_size() * (params.numel() + width * self.network.width)
            if bytes > bytes_left or max(width, widest) > MOST_PADDING * min(width, widest):
                blocks.append([position])
                bytes_left, widest = BLOCK_BYTES, width
            else:
                blocks[-1].append(position)
            bytes_left -= bytes
        return [np.array(positions) for positions in blocks]

    @torch.inference_mode()
    def _train_block(
        self,
        work: Work,
        start: Tensor,
        clients: Numbers,
        correction: LinearCorrection,
        params: Tensor,
        positions: Numbers,
    ) -> None:
        """Train the clients at some positions, and write their results to those of `params`."""
        correction = part_of(correction, torch.from_numpy(positions))
        step = DenseStep.of(self.network, start, work.lr, work.local, correction)
        weights = self.network.split(start.repeat(len(positions), 1))
        for x, y, counted in block_batches(work, self.network, clients[positions], start.dtype):
            some = weights if len(x) == len(positions) else [w[: len(x)] for w in weights]
            step(some, self.network.factors(some, x.flatten(2), y, counted))
        params[torch.from_numpy(positions)] = self.network.join(weights)


def block_batches(
    work: Work, network: DenseNetwork, clients: Numbers, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of clients that are sorted by their number of steps, most steps first.

    A client takes part while it has steps left, and a batch is as wide as its widest. It consists
    of examples [K, B, ...], labels [K, B], and the weight of each example in its client's loss,
    [K, B], which is 0 for padding.
    """
    plan = plan_cohort(work, clients.tolist())
    key, who = batch_key(work.seed, work.round), plan.who.copy()
    who[2] = work.task.train.offsets[clients]  # rows of the fields, also where those are streamed
    rows = torch.from_numpy(
        host_rows(key, who, len(plan.lengths), plan.width, work.local.batch_size)
    )
    lengths = torch.from_numpy(plan.lengths)
    real = torch.arange(plan.width) < lengths[:, :, None]
    counted = real.to(dtype) / lengths.clamp(min=1)[:, :, None]
    # a few bytes per example, so those of all steps are read at once
    labels = work.task.train.fields[network.y].index_select(0, rows.flatten()).view(rows.shape)
    plain = work.task.transform is None and bool(labels.amin() >= 0)
    changes, batch = len(rows) > 1 or plan.draws is not None, None
    for step, part in enumerate(_parts(plan.lengths)):
        if batch is None or changes:
            at = step % len(rows)
            draws = None if plan.draws is None else torch.from_numpy(plan.draws[step][part])
            x, y = _examples(work, network, rows[at][part], labels[at][part], draws)
            weights = counted[step][part]
            if not plain:  # labels below 0 count nothing, as in torch's cross entropy
                weights, y = weights * (y >= 0), y.clamp(min=0)
            batch = x, y, weights
        yield batch


def _parts(lengths: Numbers) -> list[Any]:
    """Return the indices of clients and of examples that each step uses, by lengths [S, K]."""
    counts, widths = (lengths > 0).sum(axis=1).tolist(), lengths.max(axis=1).tolist()
    clients, widest = lengths.shape[1], max(widths)
    return [
        ... if (count, width) == (clients, widest) else (slice(count), slice(width))
        for count, width in zip(counts, widths, strict=True)
    ]


def _examples(
    work: Work, network: DenseNetwork, rows: Tensor, labels: Tensor, draws: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return examples and labels as the model sees them."""
    fields, transform, picked = work.task.train.fields, work.task.transform, rows.flatten()
    if transform is None:
        return fields[network.x].index_select(0, picked).unflatten(0, rows.shape), labels
    batch = {n: v.index_select(0, picked).unflatten(0, rows.shape) for n, v in fields.items()}
    inputs = transform.train(batch, draws)
    return inputs[network.x], inputs[network.y]
