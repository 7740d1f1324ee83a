"""Dense networks on a CPU: clients side by side, with gradients that are never written down.

It gives what the loop gives, up to rounding. Clients are taken in blocks whose weights and
activations stay in the cache of a core; which blocks there are does not depend on the threads that
work on them, so neither do the numbers.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import LinearCorrection
from fedexp.engine.client_store import ClientStates
from fedexp.engine.loop import Sums, sum_in_parts, sum_updates
from fedexp.engine.plan import LARGEST, Work, host_batches
from fedexp.engine.state import SimulationState
from fedexp.engine.threads import Pool
from fedexp.objective import ModuleObjective
from fedexp.objective.dense import DenseNetwork, DenseStep, dense_network

BLOCK_BYTES = 2**20  # weights and activations of clients that advance together
MOST_PADDING = 2  # how many times wider a block's widest batch may be than its narrowest


def dense_network_of(work: Work, state: SimulationState) -> DenseNetwork | None:
    """Return the network where this engine suits: a plain dense classifier, a linear correction."""
    objective, train = work.task.objective, work.task.train
    if not isinstance(objective, ModuleObjective) or objective.compute_type is not None:
        return None
    linear = work.algorithm.client.is_linear
    network = dense_network(objective)
    if state.params.device.type != "cpu" or not linear or network is None:
        return None
    batch = train.batch(int(work.cohort[0]), np.arange(1))
    batch = batch if work.task.transform is None else work.task.transform.evaluate(batch)
    x, y = batch["x"], batch["y"]
    row = x.flatten(1) if network.flattens else x
    fits = row.shape == (1, network.layers[0].inputs) and x.dtype == state.params.dtype
    labels = y.shape == (1,) and y.dtype == torch.int64
    return network if fits and labels and train.largest < LARGEST else None


class Dense:
    """The engine; it has a thread for each that torch would use in one operation."""

    name = "dense"

    def __init__(self, network: DenseNetwork) -> None:
        self.network, self.pool = network, Pool()

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        return sum_in_parts(work, state, self.run_clients, least=self.pool.count)

    def run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        """Train some clients, block by block."""
        rule, chosen = work.algorithm.client, np.asarray(clients)
        fresh = rule.init_client_state(state.params)
        client_state = ClientStates.of(state.clients).stacked(clients, fresh)
        correction = rule.linear_correction(state.broadcast, client_state)
        params = state.params.new_empty(len(clients), len(state.params))
        blocks = self.blocks(work, state.params, chosen)
        train = partial(self._train_block, work, state.params, chosen, correction, params)
        self.pool.map(train, blocks)
        total_lr = torch.from_numpy(_steps(work, chosen) * work.lr)[:, None].to(params.dtype)
        return sum_updates(work, state, clients, state.params - params, total_lr, client_state)

    def blocks(
        self, work: Work, params: Tensor, clients: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """The places of clients that advance together, those with most to do first."""
        lengths = work.task.train.sizes[clients]
        widths = np.minimum(lengths, work.local.batch_size or lengths)
        order = np.lexsort((-widths, -_steps(work, clients)))
        found, room, widest = [], 0, 0
        for place in order:
            width = int(widths[place])
            bytes = params.element_size() * (params.numel() + width * self.network.width)
            if bytes > room or max(width, widest) > MOST_PADDING * min(width, widest):
                found.append([place])
                room, widest = BLOCK_BYTES, width
            else:
                found[-1].append(place)
            room -= bytes
        return [np.array(places) for places in found]

    @torch.inference_mode()
    def _train_block(
        self,
        work: Work,
        start: Tensor,
        clients: NDArray[np.int64],
        correction: LinearCorrection,
        params: Tensor,
        places: NDArray[np.int64],
    ) -> None:
        """Train the clients at some places, and write what they end at to those of `params`."""
        step = DenseStep.of(self.network, start, work.lr, work.local, _part(correction, places))
        weights = self.network.split(start.repeat(len(places), 1))
        for x, y, counted in host_batches(work, clients[places], start.dtype):
            some = weights if len(x) == len(places) else [w[: len(x)] for w in weights]
            step(some, self.network.factors(some, x.flatten(2), y, counted))
        params[torch.from_numpy(places)] = self.network.join(weights)


def _steps(work: Work, clients: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many steps each client takes."""
    sizes = work.task.train.sizes[clients].tolist()
    return np.array([work.local.steps_for(size) for size in sizes])


def _part(correction: LinearCorrection, places: NDArray[np.int64]) -> LinearCorrection:
    """The drift of some clients; one without a dimension of clients is common to all."""
    if correction.offset is None or correction.offset.ndim == 1:
        return correction
    return correction._replace(offset=correction.offset[torch.from_numpy(places)])
