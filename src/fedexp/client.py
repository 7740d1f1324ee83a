"""Client rules: how a client corrects its gradient, and what it adds to the sums.

A rule is a frozen dataclass of pure functions. Gradients and parameters may carry a leading
dimension of clients; everything here is elementwise, so the same rule serves a loop over clients
and a batched program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require

Tensors = Mapping[str, Tensor]


class Drift(NamedTuple):
    """A correction that is linear in the parameters: g + pull (w - w⁰) + push."""

    pull: float = 0.0
    push: Tensor | None = None


@dataclass(frozen=True)
class ClientRule:
    """The interface, with the answers of a rule that keeps no state and corrects nothing.

    A rule says how it corrects a gradient by its `drift`, or by `correct` where it is of no such
    form; engines may train quadratic problems in one go with the first.
    """

    def init_shared(self, params: Tensor) -> Tensors:
        """What the server keeps for this rule and sends beside the model."""
        return {}

    def init_local(self, params: Tensor) -> Tensors:
        """What one client keeps between the rounds it takes part in."""
        return {}

    def drift(self, shared: Tensors, local: Tensors) -> Drift:
        """The correction, where it is linear in the parameters."""
        return Drift()

    @property
    def is_linear(self) -> bool:
        """Whether `drift` is all there is to the correction."""
        return type(self).correct is ClientRule.correct

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, shared: Tensors, local: Tensors
    ) -> Tensor:
        """The corrected gradient at `params`, of a client that began the round at `start`.

        The next step may overwrite `grad`: what outlives a step must be a copy.
        """
        pull, push = self.drift(shared, local)
        if pull:
            grad = grad.add(params - start, alpha=pull)
        return grad if push is None else grad + push

    def finish(
        self, delta: Tensor, travel: Tensor | float, shared: Tensors, local: Tensors
    ) -> tuple[Tensors, Tensors]:
        """The client's new state, and the extras it adds to the round's sums.

        Args:
            delta: Δ_i = w - w_i.
            travel: number of local steps times their learning rate, τ η_l.
        """
        return {}, {}

    def update_shared(self, shared: Tensors, aggregate: Aggregate, total_weight: float) -> Tensors:
        """The server's new shared state; `total_weight` is the weight of all clients there are."""
        return shared


@dataclass(frozen=True)
class SGD(ClientRule):
    """Plain local SGD (eq. 2)."""


@dataclass(frozen=True)
class Prox(ClientRule):
    """FedProx: the gradient of F_i(w) + (μ/2) ||w - w^t||², pulled back to where it began.

    Args:
        mu: strength μ >= 0; 0 is plain SGD.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        require(math.isfinite(self.mu) and self.mu >= 0, f"mu must be >= 0, not {self.mu}")

    def drift(self, shared: Tensors, local: Tensors) -> Drift:
        return Drift(pull=self.mu)


@dataclass(frozen=True)
class Scaffold(ClientRule):
    """SCAFFOLD, option II (Algorithm 2): the gradient is corrected by control variates.

    Locally w ← w - η_l (g - c_i + c). After τ steps Ψ_i = c - Δ_i / (τ η_l), c_i ← c_i - Ψ_i, and
    the server takes c ← c - sum_S p_i Ψ_i / sum_all p_i. With uniform weights that is
    c - (|S|/N) mean Ψ, so c stays the mean of all c_i under partial participation too.
    """

    def init_shared(self, params: Tensor) -> Tensors:
        return {"control": torch.zeros_like(params)}

    def init_local(self, params: Tensor) -> Tensors:
        return {"control": torch.zeros_like(params)}

    def drift(self, shared: Tensors, local: Tensors) -> Drift:
        return Drift(push=shared["control"] - local["control"])

    def finish(
        self, delta: Tensor, travel: Tensor | float, shared: Tensors, local: Tensors
    ) -> tuple[Tensors, Tensors]:
        psi = shared["control"] - delta / travel
        return {"control": local["control"] - psi}, {"control": psi}

    def update_shared(self, shared: Tensors, aggregate: Aggregate, total_weight: float) -> Tensors:
        change = aggregate.extras["control"] / total_weight
        return {"control": shared["control"] - change.to(shared["control"].dtype)}
