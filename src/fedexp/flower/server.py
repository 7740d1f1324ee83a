"""`Server`: the server side of an algorithm, independent of how its sums arrive."""

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
    """The model and the server state of an algorithm between rounds.

    Args:
        algorithm: e.g. `fedexp.fedexp(eps=1e-3)`.
        arrays: the initial model.
        buffers: names of the arrays that are averaged; see `Layout.of`.
        tied: further names of parameters; see `Layout.of`.

    Attributes:
        layout: the conversion between the model's arrays and vectors.
        state: all that is needed to resume; client states are stored by the clients.
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
        self.state = self._initial_state(arrays)
        bad = next((n for n, v in ndarrays(arrays).items() if not np.isfinite(v).all()), None)
        require(
            bad is None,
            f"the initial model has values that are not finite ({bad!r}); start from a finite one; "
            "register a mask with persistent=False, so that it stays out of the state_dict",
        )

    def lay_out(self, layout: Layout) -> None:
        """Change which arrays of the initial model are buffers or tied."""
        require(self.state.steps == 0, "the layout of a model is fixed at the first step")
        arrays, round = self.model(), self.state.round
        self.layout = layout
        self.state = replace(self._initial_state(arrays), round=round)

    def adopt(self, arrays: ArrayRecord, round: int) -> None:
        """Replace the model after a round by these arrays.

        Clients train from them next, and they are evaluated; the state of the rule is unchanged.
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

    def model(self) -> ArrayRecord:
        """Return the last iterate, from which clients train."""
        return self.layout.arrays(self.state.params, self.state.buffers)

    def output(self) -> ArrayRecord:
        """Return the mean of the last iterates, which is evaluated and returned (Section 5)."""
        return self.layout.arrays(*self.state.output())

    def broadcast(self) -> ArrayRecord | None:
        """Return the broadcast state of the client rule (SCAFFOLD's c); None if it has none."""
        if not self.state.broadcast:
            return None
        return ArrayRecord(
            {name: Array(value.numpy()) for name, value in self.state.broadcast.items()}
        )

    def start_point(self) -> Tensor:
        """Return the parameters as clients received them, rounded to the types of the arrays."""
        return self.layout.rounded(self.state.params)

    def contribution(self, arrays: Arrays, start: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a client's update Δ_i = w - w_i, and the change of its buffers as an extra."""
        before, after = self.state.buffers.averaged, self.layout.buffers(arrays).averaged
        extras = {"buffers": buffer_changes(after, before)} if after.numel() else {}
        return start - self.layout.flat(arrays), extras

    def step(self, aggregate: Aggregate, total_weight: float) -> dict[str, float]:
        """Take the server step of a round; return its metrics.

        A round without clients does not change the model. One that diverges raises
        `DivergedError` and leaves the state of the round before.

        Args:
            aggregate: the sums of the round.
            total_weight: of all clients, in this round or not.
        """
        after = replace(self.state, round=self.state.round + 1)
        metrics = {"clients": float(aggregate.count), "dropped": float(aggregate.dropped)}
        if aggregate.count > 0:
            after, of_rule = server_step(self.algorithm, after, aggregate, total_weight)
            self._check(after)
            metrics = norm_metrics(aggregate) | of_rule | metrics
        self.state = after
        return metrics

    def _initial_state(self, arrays: ArrayRecord) -> SimulationState:
        params, buffers = self.layout.flat(arrays), self.layout.buffers(arrays)
        return SimulationState.of(params, buffers, self.algorithm)

    def _check(self, after: SimulationState) -> None:
        check_range(after)
        if not self.layout.rounded(after.params).isfinite().all():
            raise DivergedError(after.round, "the model no longer fits the type of its arrays")
        if not _is_finite(after):
            raise DivergedError(after.round, "a buffer or the state of a rule is not finite")


def _is_finite(state: SimulationState) -> bool:
    """Return whether everything that a checkpoint would store is finite."""
    of_rules = [v for v in (*state.server.values(), *state.broadcast.values()) if v.ndim]
    stored = [state.params, state.buffers.averaged, *of_rules]  # a scalar such as eps may be inf
    return all(bool(torch.isfinite(value).all()) for value in stored)


def norm_metrics(aggregate: Aggregate) -> dict[str, float]:
    """Return the norms that determine FedExP's step, also for rules that do not report them."""
    mean_sq_norm, sq_norm_of_mean = aggregate.mean_sq_norm, aggregate.sq_norm_of_mean
    return {
        "diversity": float(diversity(mean_sq_norm, sq_norm_of_mean)),
        "mean_sq_norm": float(mean_sq_norm),
        "sq_norm_of_mean": float(sq_norm_of_mean),
    }
