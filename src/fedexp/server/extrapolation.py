"""FedExP: a server step size that grows with the disagreement of the clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require
from fedexp.precision import widest
from fedexp.server.averaging import accumulate
from fedexp.server.base import (
    Metrics,
    ServerRule,
    State,
    Step,
    descend,
    require_fraction,
    require_numbers,
    scalar,
    vector,
)

EpsMode = Literal["absolute", "participants", "relative"]


def exp_step_size(
    mean_sq_norm: Tensor | float,
    sq_norm_of_mean: Tensor | float,
    eps: Tensor | float = 0.0,
    *,
    factor: float = 2.0,
    clamp: bool = True,
    max_step: float = math.inf,
) -> Tensor | float:
    """Return the FedExP server step size (eq. 8, docs/paper.md#fedexp-step-size).

    η_g = max(1, mean ||Δ_i||² / (factor · (||mean Δ_i||² + eps)))

    It is defined for every input: 1 where the mean update is zero (docs/paper.md#zero-update), and
    where the ratio overflows without a `max_step`. Returns a float for floats, else a tensor.

    Args:
        mean_sq_norm: mean of the clients' squared norms, over the whole update.
        sq_norm_of_mean: squared norm of the mean update, with the same weights.
        eps: small constant >= 0 that bounds the ratio; infinity gives FedAvg.
        factor: 2 as printed; 1 when clients project exactly (App. C.4.1,
            docs/paper.md#exact-projection-step).
        clamp: return at least 1, the step size of FedAvg.
        max_step: upper bound; not in the paper, off by default.

    >>> exp_step_size(mean_sq_norm=8.0, sq_norm_of_mean=1.0)
    4.0
    >>> exp_step_size(8.0, 1.0, eps=3.0), exp_step_size(0.0, 0.0)
    (1.0, 1.0)
    """
    values = (mean_sq_norm, sq_norm_of_mean, eps)
    dtype = widest(next((x.device for x in values if isinstance(x, Tensor)), torch.device("cpu")))
    numerator, denominator, eps = (torch.as_tensor(x, dtype=dtype) for x in values)
    ratio = numerator / (factor * (denominator + eps))
    step = ratio.clamp(min=1.0 if clamp else None, max=max_step)
    step = torch.where((denominator > 0) & step.isfinite(), step, 1.0)
    return step if any(isinstance(x, Tensor) for x in values) or step.ndim else step.item()


@dataclass(frozen=True)
class ExP(ServerRule):
    """FedExP (Algorithm 1): w ← w - η_g Δ̄, with η_g from `exp_step_size`.

    Besides `server_lr` it reports `diversity` (r = mean ||Δ_i||² / ||Δ̄||², at least 1; FedExP
    differs from FedAvg when r > 2, or later where eps is large), `mean_sq_norm`, `sq_norm_of_mean`,
    `clamped` (1 where the clamp is active) and `eps_share` (the share of eps in the denominator).

    Args:
        eps: added to ||Δ̄||², >= 0, in the unit of `eps_mode`. The paper's rule of thumb: start at
            1e-3, raise it until the result drops (docs/paper.md#epsilon-rule-of-thumb). `eps_share`
            does not tell a good eps: over the runs of docs/reproduction-appendix.md it is 0.2 on
            CIFAR-10 and 0.9 on EMNIST where FedExP needs the fewest rounds.
        factor: 2 as printed; 1 for exact projections.
        clamp: keep η_g >= 1.
        max_step: upper bound of η_g.
        eps_mode: "absolute" as printed; "participants" multiplies eps by their number, as the
            authors' code does (docs/paper.md#released-epsilon); "relative" multiplies it by the
            mean squared norm, which makes the rule scale-free.
        eps_decay: factor on eps after every round (docs/paper.md#released-epsilon-decay).
        decay_before_first_round: decay eps before the first round as well
            (docs/paper.md#released-decay-timing).

    >>> import torch
    >>> rule, w = ExP(eps=0.0), torch.zeros(4)
    >>> w, state, metrics = rule.step(w, Aggregate.of(torch.eye(4) * 4), rule.init(w))
    >>> metrics["server_lr"].item(), metrics["diversity"].item(), w.tolist()
    (2.0, 4.0, [-2.0, -2.0, -2.0, -2.0])
    """

    average_last: ClassVar[int] = 2

    eps: float = 1e-3
    factor: float = 2.0
    clamp: bool = True
    max_step: float = math.inf
    eps_mode: EpsMode = "absolute"
    eps_decay: float = 1.0
    decay_before_first_round: bool = False

    def __post_init__(self) -> None:
        require_numbers(
            eps=self.eps, factor=self.factor, max_step=self.max_step, eps_decay=self.eps_decay
        )
        require(self.eps >= 0, f"eps must not be negative, but is {self.eps}")
        require(self.factor > 0, f"factor must be positive, not {self.factor}")
        require(self.max_step >= 1, f"max_step must be at least 1, not {self.max_step}")
        require(0 < self.eps_decay <= 1, f"eps_decay must be in (0, 1], not {self.eps_decay}")
        modes = get_args(EpsMode)
        require(self.eps_mode in modes, f"eps_mode must be one of {', '.join(modes)}")

    def init(self, params: Tensor) -> State:
        start = self.eps * (self.eps_decay if self.decay_before_first_round else 1.0)
        return {self._eps_name: scalar(start, params)}

    @property
    def _eps_name(self) -> str:
        """The name of eps in the state, so that one of another unit is not continued with."""
        return "relative_eps" if self.eps_mode == "relative" else "eps"

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        eps = state[self._eps_name]
        eta, metrics = self._extrapolate(
            aggregate.mean_sq_norm, aggregate.sq_norm_of_mean, aggregate, eps
        )
        next_params = descend(params, aggregate.mean, eta)
        return next_params, {self._eps_name: eps * self.eps_decay}, metrics

    def with_step_bound(self, most: float) -> Self:
        return self if math.isfinite(self.max_step) else replace(self, max_step=most)

    def released(self, lr_decay: float) -> Self:
        return replace(
            self,
            eps=ExP.eps if self.eps_mode == "relative" else self.eps,
            eps_mode="participants",
            eps_decay=lr_decay**2,
            decay_before_first_round=True,
        )

    def _extrapolate(
        self, mean_sq_norm: Tensor, sq_norm_of_mean: Tensor, aggregate: Aggregate, eps: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the step size and the metrics; `eps` is the decayed one."""
        if self.eps_mode == "participants":
            eps = eps * aggregate.count
        elif self.eps_mode == "relative":
            eps = eps * mean_sq_norm
        limits = {"factor": self.factor, "max_step": self.max_step}
        free = exp_step_size(mean_sq_norm, sq_norm_of_mean, eps, clamp=False, **limits)
        eta = exp_step_size(mean_sq_norm, sq_norm_of_mean, eps, clamp=self.clamp, **limits)
        assert isinstance(eta, Tensor)
        return eta, {
            "server_lr": eta,
            "diversity": diversity(aggregate.mean_sq_norm, aggregate.sq_norm_of_mean),
            "mean_sq_norm": mean_sq_norm,
            "sq_norm_of_mean": sq_norm_of_mean,
            "clamped": (eta > free).to(eta.dtype),
            "eps_share": _share(eps, sq_norm_of_mean),
        }


@dataclass(frozen=True)
class MomentumExP(ExP):
    """FedExP-M (App. F): v ← Δ̄ + β v; S ← m + (β/2) S; w ← w - S / (2 (||v||² + eps)) · v.

    m is the mean squared norm of the round (docs/paper.md#fedexp-m). The clamp is off, as printed.
    `mean_sq_norm` and `sq_norm_of_mean` report S and ||v||², which determine the step size.

    Args:
        eps: added to ||v||², >= 0, in the unit of `eps_mode`. "relative" multiplies it by S.
        beta: momentum β in [0, 1); the paper does not state it, its code uses 0.9.
        apply_momentum: False reproduces the released code, where a misspelt name means that
            momentum is never applied: the step is along Δ̄, with S in the numerator
            (docs/paper.md#released-momentum-typo).
    """

    clamp: bool = False
    beta: float = 0.9
    apply_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("beta", self.beta)

    def init(self, params: Tensor) -> State:
        numerator = scalar(0.0, params)
        return {
            **super().init(params),
            "momentum": torch.zeros_like(vector(params)),
            "sq": numerator,
        }

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        numerator = aggregate.mean_sq_norm + 0.5 * self.beta * state["sq"]
        beta = self.beta if self.apply_momentum else 0.0
        momentum = accumulate(state["momentum"], aggregate.mean, beta)
        dtype = widest(momentum.device)
        sq_norm = torch.linalg.vector_norm(momentum, dtype=dtype).square()
        eps = state[self._eps_name]
        eta, metrics = self._extrapolate(numerator, sq_norm, aggregate, eps)
        next_params = descend(params, momentum, eta)
        after = {self._eps_name: eps * self.eps_decay, "momentum": momentum, "sq": numerator}
        return next_params, after, metrics

    def released(self, lr_decay: float) -> Self:
        return replace(super().released(lr_decay), apply_momentum=False)


def diversity(mean_sq_norm: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
    """Return mean ||Δ_i||² / ||mean Δ_i||², >= 1 by Jensen's inequality; 1 when all are zero."""
    return torch.where(mean_sq_norm == 0, 1.0, mean_sq_norm / sq_norm_of_mean)


def _share(eps: Tensor, sq_norm: Tensor) -> Tensor:
    """Return eps / (sq_norm + eps), also for infinite eps; 0 where both are zero."""
    return torch.where(eps > 0, 1.0 - sq_norm / (sq_norm + eps), 0.0)
