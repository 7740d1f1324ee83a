"""Which rank trains which clients: every rank works it out for itself, and all come to the same.

`Shared`: one run on many ranks. Everything that crosses between them in a round is a sum.
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
from fedexp.client import Tensors
from fedexp.distributed.group import Ranks, neighbours
from fedexp.engine.loop import Engine, Run
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.errors import FedExPError
from fedexp.local import LocalTraining
from fedexp.objective import Buffers
from fedexp.tasks.task import Task

Clients = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Share(Work):
    """The part of a round that falls to one rank.

    Attributes:
        whole: clients of the round on all ranks.
        rank: whose part it is.
        world: how many parts there are.
    """

    whole: int = 0
    rank: int = 0
    world: int = 1

    def after(self) -> Work:
        """This rank's part of the next round, so that an engine can plan it ahead."""
        own = {each.name: getattr(self, each.name) for each in fields(Work)}
        following = Work(**{**own, "cohort": np.arange(self.whole)}).after()
        parts = shards(following, self.world)
        return replace(self, round=following.round, cohort=parts[self.rank])


def share(work: Work, parts: list[Clients], rank: int) -> Share:
    """The part of a rank, as work of its own."""
    own = {each.name: getattr(work, each.name) for each in fields(Work)}
    return Share(
        **{**own, "cohort": parts[rank]}, whole=len(work.cohort), rank=rank, world=len(parts)
    )


def shards(work: Work, world: int) -> list[Clients]:
    """The cohort in `world` parts that cost about the same; some are empty if clients are few.

    On a GPU, which pads all clients alike, parts have the same number of clients in every round, so
    that a program captured for one fits the next.
    """
    costs = examples_seen(work.task.train.sizes[work.cohort], work.local)
    on_gpu = work.task.train.device.type == "cuda"
    return [work.cohort[places] for places in dealt(costs, world, even=on_gpu)]


def examples_seen(sizes: NDArray[np.int64], local: LocalTraining) -> NDArray[np.int64]:
    """How many examples clients of these sizes go through in a round: what their training costs.

    >>> examples_seen(np.array([5, 2]), LocalTraining(steps=4, batch_size=2)).tolist()
    [7, 8]
    """
    if local.epochs is not None:
        return sizes * local.epochs
    batch = sizes if local.batch_size is None else np.full_like(sizes, local.batch_size)
    per_epoch = -(-sizes // batch)
    return local.steps // per_epoch * sizes + local.steps % per_epoch * batch


def dealt(costs: NDArray[np.int64], parts: int, even: bool = False) -> list[Clients]:
    """The places of `costs` in parts of about the same sum, each in increasing order.

    Longest processing time first: the next largest goes to the part with least to do, which is at
    most 4/3 of the best (Graham, 1969). Equal costs are cut into runs of neighbours, whose data lie
    side by side.

    Args:
        costs: what each takes.
        parts: how many parts to make.
        even: let the numbers in the parts differ by one at most.

    >>> [part.tolist() for part in dealt(np.array([5, 1, 3, 2, 1]), 2)]
    [[0, 1], [2, 3, 4]]
    >>> [part.tolist() for part in dealt(np.array([7, 7, 7]), 2)]
    [[0, 1], [2]]
    """
    places = np.arange(len(costs))
    if not len(costs) or (costs == costs[0]).all():
        return np.array_split(places, parts)
    room = [len(part) for part in np.array_split(places, parts)] if even else [len(costs)] * parts
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts) if room[part]]
    for place in np.argsort(-costs, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        found[part].append(place)
        if len(found[part]) < room[part]:
            heapq.heappush(loads, (load + int(costs[place]), part))
    return [np.array(sorted(part), dtype=np.int64) for part in found]


# Names of sums that no rule has: wishes to stop, norms of models, and which clients keep something.
WISH, NORM, KEPT = "ranks.wish", "ranks.norm", "ranks.kept"
DRIFT = 1e-6  # relative; ranks that compute the same differ by nothing
Sums = tuple[Aggregate, dict[int, Tensors]]


class DistributedGroup:
    """A run over the ranks of a job: `simulate(..., process_group=DistributedGroup(ranks()))`.

    Each rank trains its part of the cohort with the engine that was chosen for all of it. The
    packed sums are joined by one all-reduce, and every rank takes the same server step, so models
    never cross. Only where clients keep states (SCAFFOLD) do these go to all ranks besides, since
    any rank may train a client next.

    Args:
        ranks: those that take part; each of them runs `simulate` with the same arguments.
        stop: asked in every round whether this rank wants the run to stop after it.

    Attributes:
        stopping: whether some rank wanted so in the last round; the same on all of them.
    """

    def __init__(self, ranks: Ranks, stop: Callable[[], bool] = lambda: False) -> None:
        self.ranks, self.stop = ranks, stop
        self.stopping = False

    @property
    def beside(self) -> int:
        return neighbours()

    def shard(self, work: Work) -> Work:
        """The part of a round that this rank trains."""
        return share(work, shards(work, self.ranks.world), self.ranks.rank)

    def engine(self, engine: Engine) -> Run:
        """The engine for the whole cohort that an engine for a rank's part makes."""
        return partial(self._run, engine)

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        """Each rank looks at its part of the examples; a part without any says nothing."""
        own = task.evaluate(params, buffers, (self.ranks.rank, self.ranks.world))
        found = self.ranks.gather(own)
        names = dict.fromkeys(name for values in found for name in values)
        return {name: sum(values.get(name, 0.0) for values in found) for name in names}

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        parts = shards(work, self.ranks.world)
        own = share(work, parts, self.ranks.rank)
        total, changed = engine(own, state) if len(own.cohort) else (nothing(work, state), {})
        fresh = work.algorithm.client.init_client_state(state.params)
        norm = torch.linalg.vector_norm(state.params, dtype=torch.float64)
        told = {WISH: total.weight.new_full((), float(self.stop())), NORM: norm}
        if fresh:
            told[KEPT] = norm.new_tensor([float(c in changed) for c in work.cohort.tolist()])
        joined, heard = self._joined(total, told)
        self.stopping = bool(heard[WISH] > 0)
        self._check_same_model(norm, heard[NORM], work.round)
        if not fresh:
            return joined, {}
        kept = set(work.cohort[heard[KEPT].cpu().numpy() > 0].tolist())
        return joined, everyones(self.ranks, parts, changed, kept, fresh)

    def _joined(self, total: Aggregate, told: Tensors) -> tuple[Aggregate, Tensors]:
        """The sums over all ranks, with what ranks have to tell each other: that is summed too."""
        own = replace(total, extras={**total.extras, **told})
        joined = own.unpack(self.ranks.sum(own.pack()))
        rules = {name: joined.extras[name] for name in total.extras}
        return replace(joined, extras=rules), {name: joined.extras[name] for name in told}

    def _check_same_model(self, own: Tensor, summed: Tensor, round: int) -> None:
        if (own - summed / self.ranks.world).abs() > DRIFT * own:
            raise FedExPError(
                f"the ranks train different models (round {round}); give all of them the same "
                "command, data and versions"
            )


def nothing(work: Work, state: SimulationState) -> Aggregate:
    """The sums of no clients, laid out as those of some: every rank must send as much."""
    rule, params = work.algorithm.client, state.params
    client_state = {name: value[None] for name, value in rule.init_client_state(params).items()}
    _, extras = rule.end_round(torch.zeros_like(params)[None], 1.0, state.broadcast, client_state)
    if state.buffers.averaged.numel():
        extras = {**extras, "buffers": state.buffers.averaged[None]}
    return Aggregate.of(params[None][:0], None, {n: value[:0] for n, value in extras.items()})


def everyones(
    ranks: Ranks,
    parts: Sequence[Clients],
    changed: Mapping[int, Tensors],
    kept: Container[int],
    fresh: Tensors,
) -> dict[int, Tensors]:
    """The new states of the clients of all ranks.

    Args:
        ranks: those to exchange with.
        parts: which clients each of them has trained.
        changed: the states of this rank's clients.
        kept: all clients that have new states.
        fresh: a state to take shapes and types from.
    """
    most = max(len(part) for part in parts)
    tables = {}
    for name, value in fresh.items():
        own = value.new_zeros(most, *value.shape)
        for row, client in enumerate(parts[ranks.rank].tolist()):
            if client in changed:
                own[row] = changed[client][name]
        tables[name] = ranks.rows(own)
    return {
        client: {name: tables[name][rank][row].clone() for name in fresh}
        for rank, part in enumerate(parts)
        for row, client in enumerate(part.tolist())
        if client in kept
    }
