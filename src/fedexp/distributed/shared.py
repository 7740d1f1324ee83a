"""`Shared`: one run on many ranks. Everything that crosses between them in a round is a sum."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors
from fedexp.distributed.group import Ranks, neighbours
from fedexp.distributed.shards import Clients, shards, share
from fedexp.engine.loop import Engine, Run
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.errors import FedExPError
from fedexp.objective import Buffers
from fedexp.tasks.task import Task

# Names of sums that no rule has: wishes to stop, norms of models, and which clients keep something.
WISH, NORM, KEPT = "ranks.wish", "ranks.norm", "ranks.kept"
DRIFT = 1e-6  # relative; ranks that compute the same differ by nothing
Sums = tuple[Aggregate, dict[int, Tensors]]


class Shared:
    """The sharing of a run among ranks, for `simulate(..., sharing=Shared(ranks()))`.

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

    def mine(self, work: Work) -> Work:
        """The part of a round that this rank trains."""
        return share(work, shards(work, self.ranks.world), self.ranks.rank)

    def engine(self, engine: Engine) -> Run:
        """The engine for the whole cohort that an engine for a rank's part makes."""
        return partial(self._run, engine)

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        """Each rank looks at its part of the examples; a part without any says nothing."""
        mine = task.evaluate(params, buffers, (self.ranks.rank, self.ranks.world))
        found = self.ranks.gather(mine)
        names = dict.fromkeys(name for values in found for name in values)
        return {name: sum(values.get(name, 0.0) for values in found) for name in names}

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        parts = shards(work, self.ranks.world)
        mine = share(work, parts, self.ranks.rank)
        total, changed = engine(mine, state) if len(mine.cohort) else (nothing(work, state), {})
        fresh = work.algorithm.client.init_local(state.params)
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
        mine = replace(total, extras={**total.extras, **told})
        joined = mine.unpack(self.ranks.sum(mine.pack()))
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
    mine = {name: value[None] for name, value in rule.init_local(params).items()}
    _, extras = rule.finish(torch.zeros_like(params)[None], 1.0, state.shared, mine)
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
        mine = value.new_zeros(most, *value.shape)
        for row, client in enumerate(parts[ranks.rank].tolist()):
            if client in changed:
                mine[row] = changed[client][name]
        tables[name] = ranks.rows(mine)
    return {
        client: {name: tables[name][rank][row].clone() for name in fresh}
        for rank, part in enumerate(parts)
        for row, client in enumerate(part.tolist())
        if client in kept
    }
