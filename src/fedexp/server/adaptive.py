"""Adaptive server optimisers: FedAdagrad, FedAdam, FedYogi (Reddi et al., 2021) and FedAMS."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require
from fedexp.server.base import (
    ServerRule,
    State,
    Step,
    descend,
    require_fraction,
    require_numbers,
    require_positive,
    scalar,
    vector,
)

Form = Literal["standard", "printed", "authors"]


@dataclass(frozen=True)
class _Adaptive(ServerRule):
    """The update that all share: w ← w - lr · m / (√v + τ), coordinate by coordinate.

    Args:
        lr: the server step size η_g > 0.
        tau: the degree of adaptivity τ >= 0.
        form: "standard" starts v at 0, as Reddi et al. ran it; "printed" starts v at τ², as their
            Algorithm 2 allows: steps are half as long for as long as Δ̄ is small beside τ;
            "authors" divides by √(v + τ) with v starting at 0, as the FedExP authors' code does
            (docs/paper.md#released-adagrad, docs/paper.md#released-adam).
    """

    lr: float = 0.1
    tau: float = 1e-3
    form: Form = "standard"

    def __post_init__(self) -> None:
        require_positive("the server lr", self.lr)
        require_numbers(tau=self.tau)
        require(self.tau >= 0, f"tau must not be negative, but is {self.tau}")
        require(
            self.form in get_args(Form),
            f"form must be standard, printed or authors, not {self.form!r}",
        )

    def init(self, params: Tensor) -> State:
        start = self.tau**2 if self.form == "printed" else 0.0
        return {"second": torch.full_like(vector(params), start)}

    def _scale(self, second: Tensor) -> Tensor:
        """Return √v + τ."""
        return (second + self.tau).sqrt() if self.form == "authors" else second.sqrt() + self.tau

    def _descend(self, params: Tensor, direction: Tensor, scale: Tensor, state: State) -> Step:
        unchanged = scale == 0  # only with tau = 0, where all updates of a coordinate were 0
        direction = torch.where(unchanged, 0.0, direction / scale.masked_fill(unchanged, 1.0))
        return descend(params, direction, self.lr), state, {"server_lr": scalar(self.lr, params)}


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v ← v + Δ̄²; w ← w - lr · Δ̄ / (√v + τ).

    >>> import torch
    >>> rule, w = Adagrad(lr=1.0, tau=0.0), torch.tensor([0.0, 0.0])
    >>> w, state, metrics = rule.step(w, Aggregate.of([[4.0, 0.0]]), rule.init(w))
    >>> w.tolist()
    [-1.0, 0.0]
    """

    reads_norms: ClassVar[bool] = False

    def released(self, lr_decay: float) -> Self:
        return replace(self, form="authors", tau=0.01)

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        mean = aggregate.mean.to(state["second"].dtype)
        second = state["second"] + mean.square()
        return self._descend(params, mean, self._scale(second), {"second": second})


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam: m ← β₁ m + (1-β₁) Δ̄; v ← β₂ v + (1-β₂) Δ̄²; w ← w - lr · m / (√v + τ).

    There is no bias correction, as in Reddi et al. The form "authors" squares m instead of Δ̄.

    Args:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
    """

    reads_norms: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("beta1", self.beta1)
        require_fraction("beta2", self.beta2)

    def init(self, params: Tensor) -> State:
        return {**super().init(params), "first": torch.zeros_like(vector(params))}

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        moments = self._moments(aggregate, state)
        return self._descend(params, moments["first"], self._scale(moments["second"]), moments)

    def released(self, lr_decay: float) -> Self:
        return replace(self, form="authors", tau=1e-4)

    def _moments(self, aggregate: Aggregate, state: State) -> dict[str, Tensor]:
        mean = aggregate.mean.to(state["second"].dtype)
        first = self.beta1 * state["first"] + (1 - self.beta1) * mean
        squared = (first if self.form == "authors" else mean).square()
        return {"first": first, "second": self._second_moment(state["second"], squared)}

    def _second_moment(self, second: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * squared


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: as FedAdam, with v ← v - (1-β₂) Δ̄² sign(v - Δ̄²)."""

    reads_norms: ClassVar[bool] = False

    def released(self, lr_decay: float) -> Self:
        return self  # their code has no FedYogi

    def _second_moment(self, second: Tensor, squared: Tensor) -> Tensor:
        return second - (1 - self.beta2) * squared * torch.sign(second - squared)


@dataclass(frozen=True)
class AMS(Adam):
    """FedAMS (Wang, Lin and Chen, 2022): FedAdam with a running maximum of v.

    m and v as in FedAdam. With the default `stabilise="max"`

        v̂ ← max(v̂, v, τ);  w ← w - lr · m / √v̂

    and with "sum", known as FedAMSGrad, v̂ ← max(v̂, v); w ← w - lr · m / (√v̂ + τ). The paper's
    text was not available: names and formulas agree with a public reimplementation that has
    both. The released code is "sum" with the bias corrections of Adam, and starts v̂ at another
    value than 0, which acts as τ in "max".

    Args:
        tau: "max" compares τ with v, so that √τ is what FedAdam adds to √v; "sum" adds it to √v̂.
        stabilise: "max" or "sum".

    >>> import torch
    >>> rule, w = AMS(lr=1.0, tau=0.01, beta1=0.0, beta2=0.0), torch.zeros(2)
    >>> w, state, metrics = rule.step(w, Aggregate.of([[2.0, 0.01]]), rule.init(w))
    >>> [round(weight, 6) for weight in w.tolist()]
    [-1.0, -0.1]
    """

    reads_norms: ClassVar[bool] = False

    tau: float = 1e-6
    stabilise: Literal["max", "sum"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.form == "standard", "form belongs to FedAdam; FedAMS has stabilise, max or sum"
        )
        require(
            self.stabilise in ("max", "sum"), f"stabilise is max or sum, not {self.stabilise!r}"
        )

    def released(self, lr_decay: float) -> Self:
        return self  # their code has no FedAMS

    def init(self, params: Tensor) -> State:
        return {**super().init(params), "largest": torch.zeros_like(vector(params))}

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        moments = self._moments(aggregate, state)
        largest = torch.maximum(state["largest"], moments["second"])
        if self.stabilise == "max":
            largest = largest.clamp(min=self.tau)
        scale = largest.sqrt() if self.stabilise == "max" else self._scale(largest)
        return self._descend(params, moments["first"], scale, {**moments, "largest": largest})
