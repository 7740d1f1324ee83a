"""`Server`: what a server knows between rounds, whatever way its sums arrive."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.engine import SimulationState
from fedexp.engine.server_step import check_range, server_step
from fedexp.errors import DivergedError, require
from fedexp.flower.layout import Arrays, Layout
from fedexp.server.extrapolation import diversity


class Server:
    """The server's side of an algorithm, free of transport.

    Args:
        algorithm: e.g. `fedexp.fedexp(eps=1e-3)`.
        arrays: the first model.
        buffers: names of the arrays that are averaged; see `Layout.of`.

    Attributes:
        layout: how the model's arrays become vectors.
        state: all that is needed to go on from here; clients keep their own states.
    """

    def __init__(
        self, algorithm: Algorithm, arrays: ArrayRecord, buffers: Collection[str] | None = None
    ) -> None:
        self.algorithm = algorithm
        self.layout = Layout.of(arrays, buffers)
        params, others = self.layout.flat(arrays), self.layout.buffers(arrays)
        finite = bool(params.isfinite().all()) and bool(others.averaged.isfinite().all())
        require(finite, "the first model has values that are not finite; start from a sound one")
        self.state = SimulationState.of(params, others, algorithm)

    def model(self) -> ArrayRecord:
        """The last iterate: what clients train from."""
        return self.layout.arrays(self.state.params, self.state.buffers)

    def output(self) -> ArrayRecord:
        """The mean of the last iterates: what is evaluated and returned (sec. 5)."""
        return self.layout.arrays(*self.state.output())

    def shared(self) -> ArrayRecord | None:
        """What the client rule sends beside the model (SCAFFOLD's c); None if nothing."""
        if not self.state.shared:
            return None
        return ArrayRecord(
            {name: Array(value.numpy()) for name, value in self.state.shared.items()}
        )

    def start_point(self) -> Tensor:
        """The parameters that clients received, rounded as they were sent."""
        return self.layout.rounded(self.state.params)

    def contribution(self, arrays: Arrays, start: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A client's update Δ_i = w - w_i, and its buffers as a further term of the sums."""
        averaged = self.layout.buffers(arrays).averaged
        extras = {"buffers": averaged} if averaged.numel() else {}
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


def norms(aggregate: Aggregate) -> dict[str, float]:
    """The numbers that explain a step, for rules that do not report them."""
    mean_sq_norm, sq_norm_of_mean = aggregate.mean_sq_norm, aggregate.sq_norm_of_mean
    return {
        "diversity": float(diversity(mean_sq_norm, sq_norm_of_mean)),
        "mean_sq_norm": float(mean_sq_norm),
        "sq_norm_of_mean": float(sq_norm_of_mean),
    }
