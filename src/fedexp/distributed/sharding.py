"""Sharding one run over ranks: each rank trains part of the cohort, one all-reduce adds the sums.

`DistributedGroup` is the `ProcessGroup` that `simulate` takes. The shards of a cohort are balanced
by training cost and computed by every rank from the same inputs, so nothing has to be exchanged
before a round; after it, ranks exchange the packed `Aggregate` and, where clients have state
(SCAFFOLD), the new client states.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors, zero_extras
from fedexp.clipping import clipped_sums
from fedexp.distributed.group import Ranks, local_world_size
from fedexp.engine.base import Engine, Run, Sums, buffer_extras
from fedexp.engine.plan import Work, step_lengths
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from fedexp.errors import FedExPError
from fedexp.objective import Buffers
from fedexp.tasks.task import RunProgram, Task

Clients = NDArray[np.int64]
# Extra sums of the all-reduce, under names that no client rule uses: ranks that want to stop, norms
# of the models, and the clients with new states.
STOP, NORM, CHANGED = "ranks.stop", "ranks.norm", "ranks.changed"
TOLERANCE = 1e-6  # relative, of model norms; ranks with equal models differ by nothing


class DistributedGroup(ProcessGroup):
    """A process group for one run: `simulate(..., process_group=DistributedGroup(ranks()))`.

    Each rank trains its shard of the cohort with the engine chosen for the whole cohort. One
    all-reduce adds the packed sums, and every rank takes the same server step, so model weights are
    never sent. Client states (SCAFFOLD) are all-gathered, since any rank may train a client next.

    Args:
        ranks: the ranks of the job; each calls `simulate` with the same arguments.
        stop: polled every round; returns whether this rank wants the run to stop after it.

    Attributes:
        stopping: whether any rank wanted to stop in the last round; equal on all ranks.
    """

    def __init__(self, ranks: Ranks, stop: Callable[[], bool] = lambda: False) -> None:
        self.ranks, self.stop = ranks, stop
        self.stopping = False

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this machine."""
        return local_world_size()

    def shard(self, work: Work) -> CohortShard:
        """Return the part of a round that this rank trains."""
        return CohortShard.of(work, self.ranks.rank, self.ranks.world_size)

    def engine(self, engine: Engine) -> Run:
        """Return an engine for the whole cohort that trains this rank's shard with `engine`."""
        return partial(self._run, engine)

    def evaluate(
        self, task: Task, params: Tensor, buffers: Buffers, run: RunProgram | None
    ) -> dict[str, float]:
        """Evaluate with each rank on its part of the examples, which may be empty."""
        totals = task.totals(params, buffers, (self.ranks.rank, self.ranks.world_size), run)
        first, *others = self.ranks.all_gather_object(totals)
        return task.finish(sum(others, first))

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        shard = self.shard(work)
        total, states = (
            engine(shard, state) if len(shard.cohort) else (empty_aggregate(work, state), {})
        )
        initial = work.init_client_state(state.params)
        norm = torch.linalg.vector_norm(state.params, dtype=torch.float64)
        flags = {STOP: total.weight.new_full((), float(self.stop())), NORM: norm}
        if initial:
            flags[CHANGED] = norm.new_tensor([float(c in states) for c in work.cohort.tolist()])
        total, summed = self._all_reduce(total, flags)
        self.stopping = bool(summed[STOP] > 0)
        if (norm - summed[NORM] / self.ranks.world_size).abs() > TOLERANCE * norm:
            raise FedExPError(
                f"the ranks train different models (round {work.round}); give all of them the same "
                "command, data and versions"
            )
        if not initial:
            return total, {}
        changed = set(work.cohort[summed[CHANGED].cpu().numpy() > 0].tolist())
        return total, all_gather_states(self.ranks, shard.shards, states, changed, initial)

    def _all_reduce(self, total: Aggregate, extras: Tensors) -> tuple[Aggregate, Tensors]:
        """Sum an aggregate over all ranks, and further tensors with it in the same message."""
        message = replace(total, extras={**total.extras, **extras})
        summed = message.unpack(self.ranks.all_reduce(message.pack()))
        of_rule = {name: summed.extras[name] for name in total.extras}
        return replace(summed, extras=of_rule), {name: summed.extras[name] for name in extras}


@dataclass(frozen=True, eq=False, kw_only=True)
class CohortShard(Work):
    """The work of one rank in a round: `cohort` holds its clients only.

    Attributes:
        whole: the work of all ranks.
        shards: the clients that each rank trains.
        rank: the rank that trains this shard.
    """

    whole: Work
    shards: Sequence[Clients]
    rank: int

    @classmethod
    def of(cls, work: Work, rank: int, world_size: int) -> CohortShard:
        """Return the shard of a rank."""
        shards = shard_cohort(work, world_size)
        common = {field.name: getattr(work, field.name) for field in fields(Work)}
        common["cohort"] = shards[rank]
        return cls(**common, whole=work, shards=shards, rank=rank)

    def after(self) -> CohortShard:
        """Return this rank's shard of the next round, so that an engine can prefetch it."""
        return CohortShard.of(self.whole.after(), self.rank, len(self.shards))


def shard_cohort(work: Work, world_size: int) -> list[Clients]:
    """Split a cohort into `world_size` shards of about equal cost; with few clients some are empty.

    On a GPU, which pads all clients to one size, shards have the same number of clients in every
    round, so that a captured CUDA graph fits the next cohort.
    """
    if not len(work.cohort):
        return [work.cohort] * world_size
    # the cost of a client: how many examples it processes in a round
    costs = step_lengths(work.task.train.sizes[work.cohort], work.local).sum(axis=0)
    on_gpu = work.task.train.device.type == "cuda"
    return [work.cohort[part] for part in balanced_parts(costs, world_size, even=on_gpu)]


def balanced_parts(costs: NDArray[np.int64], parts: int, even: bool = False) -> list[Clients]:
    """Split the indices of `costs` into parts of about the same total cost, each sorted.

    Longest processing time first: the next largest cost goes to the part with the smallest total,
    which is at most 4/3 of the optimum (Graham, 1969). Equal costs are split into contiguous runs,
    whose data are contiguous in memory.

    Args:
        costs: cost of each item.
        parts: number of parts.
        even: let the number of items differ by at most one between parts.

    >>> [part.tolist() for part in balanced_parts(np.array([5, 1, 3, 2, 1]), 2)]
    [[0, 1], [2, 3, 4]]
    >>> [part.tolist() for part in balanced_parts(np.array([7, 7, 7]), 2)]
    [[0, 1], [2]]
    """
    indices = np.arange(len(costs))
    if not len(costs) or (costs == costs[0]).all():
        return np.array_split(indices, parts)
    limits = (
        [len(part) for part in np.array_split(indices, parts)] if even else [len(costs)] * parts
    )
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts) if limits[part]]
    for index in np.argsort(-costs, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        members[part].append(index)
        if len(members[part]) < limits[part]:
            heapq.heappush(loads, (load + int(costs[index]), part))
    return [np.array(sorted(part), dtype=np.int64) for part in members]


def empty_aggregate(work: Work, state: SimulationState) -> Aggregate:
    """Return the sums of no clients, with the layout that all-reduce needs on every rank."""
    rule, params = work.algorithm.client, state.params
    extras = {name: value[None] for name, value in zero_extras(rule, params).items()}
    if state.buffers.averaged.numel():
        averaged = buffer_extras(state.buffers.averaged[None], rule.weight_factor(1.0))
        extras = {**extras, **averaged}
    nothing, none = params[None][:0], {name: value[:0] for name, value in extras.items()}
    if work.limits is not None:
        return clipped_sums(nothing, None, none, work.limits)
    return Aggregate.of(nothing, None, none)


def all_gather_states(
    ranks: Ranks,
    shards: Sequence[Clients],
    states: Mapping[int, Tensors],
    changed: Container[int],
    initial: Tensors,
) -> dict[int, Tensors]:
    """Return the new client states of all ranks, by client.

    Args:
        ranks: the ranks to exchange with.
        shards: the clients that each rank has trained.
        states: the new states of this rank's clients.
        changed: all clients that have a new state.
        initial: an initial client state, for shapes and dtypes.
    """
    most = max(len(shard) for shard in shards)
    gathered = {}
    for name, value in initial.items():
        rows = value.new_zeros(most, *value.shape)
        for row, client in enumerate(shards[ranks.rank].tolist()):
            if client in states:
                rows[row] = states[client][name]
        gathered[name] = ranks.all_gather(rows)
    return {
        client: {name: gathered[name][rank][row].clone() for name in initial}
        for rank, shard in enumerate(shards)
        for row, client in enumerate(shard.tolist())
        if client in changed
    }
