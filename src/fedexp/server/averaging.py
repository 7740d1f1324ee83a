"""Averaging with a fixed server step size: plain, with momentum, and normalised by work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    require_positive,
    scalar,
    vector,
)


@dataclass(frozen=True)
class Average(ServerRule):
    """Generalised FedAvg: w ← w - lr · Δ̄ (eq. 4). With lr = 1 the clients' models are averaged.

    Args:
        lr: the server step size η_g > 0.

    >>> import torch
    >>> rule, w = Average(), torch.tensor([1.0, 1.0])
    >>> w, state, metrics = rule.step(w, Aggregate.of([[1.0, 0.0], [0.0, 1.0]]), rule.init(w))
    >>> w.tolist()
    [0.5, 0.5]
    """

    reads_norms: ClassVar[bool] = False

    lr: float = 1.0

    def __post_init__(self) -> None:
        require_positive("the server lr", self.lr)

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        next_params = descend(params, aggregate.mean, self.lr)
        return next_params, state, {"server_lr": scalar(self.lr, params)}


@dataclass(frozen=True)
class Momentum(Average):
    """FedAvg-M: v ← Δ̄ + β v; w ← w - lr · v (App. F, docs/paper.md#fedavg-m).

    With `nesterov` w ← w - lr · (Δ̄ + β v), as `torch.optim.SGD(nesterov=True)` does.

    Args:
        lr: the server step size η_g > 0.
        beta: momentum β in [0, 1).
        nesterov: Nesterov's momentum.
    """

    reads_norms: ClassVar[bool] = False

    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("beta", self.beta)

    def init(self, params: Tensor) -> State:
        return {"momentum": torch.zeros_like(vector(params))}

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        momentum = accumulate(state["momentum"], aggregate.mean, self.beta)
        ahead = accumulate(momentum, aggregate.mean, self.beta) if self.nesterov else momentum
        next_params = descend(params, ahead, self.lr)
        return next_params, {"momentum": momentum}, {"server_lr": scalar(self.lr, params)}


def accumulate(momentum: Tensor, mean: Tensor, beta: float) -> Tensor:
    """Return the heavy-ball momentum Δ̄ + β v, in the type of v."""
    return (mean + beta * momentum).to(momentum.dtype)


@dataclass(frozen=True)
class NormalisedAverage(Average):
    """FedNova (Wang et al., 2020): w ← w - lr · a_eff · mean_p(Δ_i / a_i), with the client `Nova`.

    a_i is the work of client i, its number of local steps, and a_eff = mean_p a_i. FedAvg weighs a
    client by its work, and converges to the optimum of another objective where work is unequal;
    here every client counts by its weight p_i. With equal work it is FedAvg.

    The sums have the weights q_i = p_i / a_i (see `Nova`), by which the step is
    lr · mean_q a_i² / (mean_q a_i)² · mean_q Δ_i. `server_lr` reports the factor on mean_q Δ_i.

    Args:
        lr: the server step size η_g > 0.
    """

    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        require(
            "work" in aggregate.extras,
            "FedNova needs the work of every client in the sums; use client=fedexp.Nova() with it",
        )
        work = aggregate.mean_extra("work").squeeze()
        ratio = aggregate.mean_extra("sq_work").squeeze() / work.square()
        eta = self.lr * torch.where(work > 0, ratio, 1.0)
        return descend(params, aggregate.mean, eta), state, {"server_lr": eta}
