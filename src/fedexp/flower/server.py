"""`Server`: what a server knows between rounds, whatever way its sums arrive."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.engine import SimulationState
from fedexp.engine.state import check_range, server_step
from fedexp.errors import DivergedError, require
from fedexp.flower.layout import Arrays, Layout, ndarrays
from fedexp.objective import buffer_changes
from fedexp.server.extrapolation import diversity


class Server:
    """The server's side of an algorithm, free of transport.

    Args:
        algorithm: e.g. `fedexp.fedexp(eps=1e-3)`.
        arrays: the first model.
        buffers: names of the arrays that are averaged; see `Layout.of`.
        tied: further names of parameters; see `Layout.of`.

    Attributes:
        layout: how the model's arrays become vectors.
        state: all that is needed to go on from here; clients keep their own states.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        arrays: ArrayRecord,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.layout = Layout.of(arrays, buffers, tied)
        self.state = self._first_state(arrays)
        bad = next((n for n, v in ndarrays(arrays).items() if not np.isfinite(v).all()), None)
        require(
            bad is None,
            f"the first model has values that are not finite ({bad!r}); start from a sound one; "
            "register a mask with persistent=False, so that it stays out of the state_dict",
        )

    def lay_out(self, layout: Layout) -> None:
        """Lay the first model out anew: which arrays are buffers or tied, clients know best."""
        require(self.state.steps == 0, "the layout of a model is settled before the first step")
        arrays, round = self.model(), self.state.round
        self.layout = layout
        self.state = replace(self._first_state(arrays), round=round)

    def adopt(self, arrays: ArrayRecord, round: int) -> None:
        """Make these arrays the model after a round, whatever the rule made of it.

        Clients train from them next, and they are what is evaluated; the rule keeps its state.
        """
        reason = self.layout.misfit(ndarrays(arrays))
        require(
            reason is None,
            f"aggregate_train returned arrays that are not the model's: {reason}; return arrays of "
            "the same names and shapes",
        )
        params, buffers = self.layout.flat(arrays), self.layout.buffers(arrays)
        after = replace(
            self.state,
            round=round,
            steps=max(1, self.state.steps),
            params=params,
            buffers=buffers,
            recent=((params, buffers),),
        )
        self._check(after)
        self.state = after

    def _first_state(self, arrays: ArrayRecord) -> SimulationState:
        params, buffers = self.layout.flat(arrays), self.layout.buffers(arrays)
        return SimulationState.of(params, buffers, self.algorithm)

    def model(self) -> ArrayRecord:
        """The last iterate: what clients train from."""
        return self.layout.arrays(self.state.params, self.state.buffers)

    def output(self) -> ArrayRecord:
        """The mean of the last iterates: what is evaluated and returned (sec. 5)."""
        return self.layout.arrays(*self.state.output())

    def broadcast(self) -> ArrayRecord | None:
        """What the client rule sends beside the model (SCAFFOLD's c); None if nothing."""
        if not self.state.broadcast:
            return None
        return ArrayRecord(
            {name: Array(value.numpy()) for name, value in self.state.broadcast.items()}
        )

    def start_point(self) -> Tensor:
        """The parameters that clients received, rounded as they were sent."""
        return self.layout.rounded(self.state.params)

    def contribution(self, arrays: Arrays, start: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A client's update Δ_i = w - w_i, and the changes of its buffers as a further term."""
        before, after = self.state.buffers.averaged, self.layout.buffers(arrays).averaged
        extras = {"buffers": buffer_changes(after, before)} if after.numel() else {}
        return start - self.layout.flat(arrays), extras

    def step(self, aggregate: Aggregate, total_weight: float) -> dict[str, float]:
        """Take the step of a round, and tell what happened in it.

        A round without clients leaves the model as it is. One that diverges raises
        `DivergedError`, and the state stays that of the round before.

        Args:
            aggregate: the sums of the round.
            total_weight: the weight of all clients there are, in this round or not.
        """
        after = replace(self.state, round=self.state.round + 1)
        metrics = {"clients": float(aggregate.count), "dropped": float(aggregate.dropped)}
        if aggregate.count > 0:
            after, of_rule = server_step(self.algorithm, after, aggregate, total_weight)
            self._check(after)
            metrics = norms(aggregate) | of_rule | metrics
        self.state = after
        return metrics

    def _check(self, after: SimulationState) -> None:
        check_range(after)
        if not self.layout.rounded(after.params).isfinite().all():
            raise DivergedError(after.round, "the model no longer fits the type of its arrays")
        if not _is_finite(after):
            raise DivergedError(after.round, "a buffer or the state of a rule is not finite")


def _is_finite(state: SimulationState) -> bool:
    """Whether all that a checkpoint would hold is finite."""
    of_rules = [v for v in (*state.server.values(), *state.broadcast.values()) if v.ndim]
    held = [state.params, state.buffers.averaged, *of_rules]  # eps may be infinite: a number
    return all(bool(torch.isfinite(value).all()) for value in held)


def norms(aggregate: Aggregate) -> dict[str, float]:
    """The numbers that explain a step, for rules that do not report them."""
    mean_sq_norm, sq_norm_of_mean = aggregate.mean_sq_norm, aggregate.sq_norm_of_mean
    return {
        "diversity": float(diversity(mean_sq_norm, sq_norm_of_mean)),
        "mean_sq_norm": float(mean_sq_norm),
        "sq_norm_of_mean": float(sq_norm_of_mean),
    }
