"""Which rank trains which clients: every rank works it out for itself, and all come to the same."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from fedexp.engine.work import Work
from fedexp.local import LocalTraining

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
