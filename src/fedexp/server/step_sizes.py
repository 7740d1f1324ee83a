"""Server step sizes that compete with FedExP's: FedHyper-G, and FedExProx-StoPS.

Both scale the mean update, as FedExP does. FedExProx-GraDS has no class here: its step size,
mean ||Δ_i||² / ||mean Δ_i||², is `ExP(eps=0, factor=1)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require
from fedexp.precision import widest
from fedexp.server.base import (
    ServerRule,
    State,
    Step,
    descend,
    require_numbers,
    require_positive,
    scalar,
    vector,
)


@dataclass(frozen=True)
class Hypergradient(ServerRule):
    """FedHyper-G (Wang, Wang and Li, 2024): the step size follows its own gradient.

        α_t = clip(α_{t-1} + <Δ̄_t, Δ̄_{t-1}>, low, high);  w ← w - α_t Δ̄_t

    It grows while successive mean updates agree in direction and falls where they turn back. The
    product has the scale of the squared updates, so how fast α changes depends on the model and on
    the client step size. Formula, bounds and the first step, 1, are those of the released code.

    Args:
        lr: α of the first round, in [low, high].
        low: smallest step size.
        high: largest step size.

    >>> import torch
    >>> rule, w = Hypergradient(), torch.zeros(2)
    >>> state = rule.init(w)
    >>> for _ in range(3):
    ...     w, state, metrics = rule.step(w, Aggregate.of([[1.0, 0.0]]), state)
    >>> metrics["server_lr"].item()
    3.0
    """

    reads_norms: ClassVar[bool] = False

    lr: float = 1.0
    low: float = 0.2
    high: float = 5.0

    def __post_init__(self) -> None:
        for name in ("lr", "low", "high"):
            require_positive(name, getattr(self, name))
        require(
            self.low <= self.lr <= self.high,
            f"the step size starts at lr = {self.lr}, outside the bounds low = {self.low} and "
            f"high = {self.high}; change lr or the bounds",
        )

    def lr_bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def init(self, params: Tensor) -> State:
        return {"lr": scalar(self.lr, params), "last": torch.zeros_like(vector(params))}

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        mean, wide = aggregate.mean.to(state["last"].dtype), widest(state["last"].device)
        product = (mean.to(wide) * state["last"]).sum()
        eta = (state["lr"] + product).clamp(self.low, self.high)
        return descend(params, mean, eta), {"lr": eta, "last": mean}, {"server_lr": eta}


@dataclass(frozen=True)
class StochasticPolyak(ServerRule):
    """FedExProx-StoPS (Li, Acharya and Richtárik, 2024), with the client `ProxEnvelope`.

    w ← w - α Δ̄ with the stochastic Polyak step size of the mean Moreau envelope,

        α = mean (M_i - inf M_i) / (γ ||mean ∇M_i||²),   ∇M_i = Δ_i / γ,

    which is (γ mean (F_i(w_i) - inf) + mean ||Δ_i||² / 2) / ||Δ̄||²: half of FedExProx-GraDS's plus
    what the clients' losses add. For convex clients with a common minimiser and exact proximal
    operators no step increases the distance to it. Elsewhere, with losses far above `inf`, steps
    can be very long: raise μ = 1/γ, set `inf`, or bound them by `max_step`.

    The paper's abstract names the stochastic Polyak step size; its equations were not available.
    The formula follows from the gradient step that FedExProx takes on the mean envelope, of length
    α γ: ||w - w*||² falls by at least 2 α γ mean (M_i - inf) - (α γ)² ||mean ∇M_i||², which is
    largest at this α.

    Args:
        max_step: upper bound of α; not in the paper, off by default.
    """

    max_step: float = math.inf

    def __post_init__(self) -> None:
        require_numbers(max_step=self.max_step)
        require(self.max_step >= 1, f"max_step must be at least 1, not {self.max_step}")

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        require(
            "envelope" in aggregate.extras,
            "StochasticPolyak needs the clients' Moreau envelopes in the sums; use "
            "client=fedexp.ProxEnvelope(mu) with it",
        )
        excess, sq_norm = aggregate.mean_extra("envelope").squeeze(), aggregate.sq_norm_of_mean
        eta = (excess / sq_norm).clamp(min=0.0, max=self.max_step)
        eta = torch.where((sq_norm > 0) & eta.isfinite(), eta, 1.0)
        metrics = {
            "server_lr": eta,
            "mean_sq_norm": aggregate.mean_sq_norm,
            "sq_norm_of_mean": sq_norm,
        }
        return descend(params, aggregate.mean, eta), state, metrics
