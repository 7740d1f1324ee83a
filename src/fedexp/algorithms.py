"""Algorithms: a client rule and a server rule. Any client rule works with any server rule.

>>> scaffold_exp(eps=0.01) == Algorithm("scaffold-exp", client=Scaffold(), server=ExP(eps=0.01))
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedexp.client import SGD, ClientRule, Prox, Scaffold
from fedexp.errors import require
from fedexp.server import Adagrad, Adam, Average, ExP, Momentum, MomentumExP, ServerRule, Yogi


@dataclass(frozen=True)
class Algorithm:
    """A client rule, a server rule, and how many iterates the output model averages.

    Args:
        name: its name in records and tables.
        client: the client rule.
        server: the server rule.
        average_last: the output model is the mean of this many last iterates; None leaves it to
            the server rule (2 for the extrapolating ones, else 1). Training never sees the mean.
    """

    name: str = "custom"
    client: ClientRule = field(default_factory=SGD)
    server: ServerRule = field(default_factory=Average)
    average_last: int | None = None

    def __post_init__(self) -> None:
        for what, rule, base in (
            ("client", self.client, ClientRule),
            ("server", self.server, ServerRule),
        ):
            given = rule.__name__ if isinstance(rule, type) else type(rule).__name__
            remedy = f"call it: {given}(...)" if isinstance(rule, type) else "give an instance"
            require(
                isinstance(rule, base),
                f"the {what} rule of {self.name!r} is {given}, not a fedexp.{base.__name__}; "
                f"{remedy}",
            )
        require(
            self.average_last is None or self.average_last >= 1,
            f"average_last must be at least 1, not {self.average_last}",
        )

    @property
    def iterates(self) -> int:
        """The number of iterates that the output model averages (docs/paper.md#output-model)."""
        return self.server.average_last if self.average_last is None else self.average_last


def fedavg(lr: float = 1.0) -> Algorithm:
    """FedAvg with a server step size (McMahan et al., 2017; eq. 4)."""
    return Algorithm("fedavg", server=Average(lr))


def fedexp(eps: float = 1e-3, **options: Any) -> Algorithm:
    """FedExP (Algorithm 1): the server steps further when clients disagree."""
    return Algorithm("fedexp", server=ExP(eps, **options))


def fedavgm(lr: float = 1.0, beta: float = 0.9) -> Algorithm:
    """FedAvg with server momentum (Hsu et al., 2019)."""
    return Algorithm("fedavgm", server=Momentum(lr, beta))


def fedexp_m(eps: float = 1e-3, beta: float = 0.9, **options: Any) -> Algorithm:
    """FedExP with server momentum (App. F)."""
    return Algorithm("fedexp-m", server=MomentumExP(eps, beta=beta, **options))


def fedprox(mu: float = 0.1, lr: float = 1.0) -> Algorithm:
    """FedProx (Li et al., 2020)."""
    return Algorithm("fedprox", client=Prox(mu), server=Average(lr))


def fedprox_exp(mu: float = 0.1, eps: float = 1e-3, **options: Any) -> Algorithm:
    """FedProx with extrapolation."""
    return Algorithm("fedprox-exp", client=Prox(mu), server=ExP(eps, **options))


def scaffold(lr: float = 1.0) -> Algorithm:
    """SCAFFOLD (Karimireddy et al., 2020), option II."""
    return Algorithm("scaffold", client=Scaffold(), server=Average(lr))


def scaffold_exp(eps: float = 1e-3, **options: Any) -> Algorithm:
    """SCAFFOLD with extrapolation (Algorithm 2)."""
    return Algorithm("scaffold-exp", client=Scaffold(), server=ExP(eps, **options))


def fedadagrad(lr: float = 0.1, tau: float = 1e-3, **options: Any) -> Algorithm:
    """FedAdagrad (Reddi et al., 2021)."""
    return Algorithm("fedadagrad", server=Adagrad(lr, tau, **options))


def fedadam(lr: float = 0.01, tau: float = 1e-3, **options: Any) -> Algorithm:
    """FedAdam (Reddi et al., 2021)."""
    return Algorithm("fedadam", server=Adam(lr, tau, **options))


def fedyogi(lr: float = 0.01, tau: float = 1e-3, **options: Any) -> Algorithm:
    """FedYogi (Reddi et al., 2021)."""
    return Algorithm("fedyogi", server=Yogi(lr, tau, **options))


# Names are resolved at the command line only.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedexp": fedexp,
    "fedavgm": fedavgm,
    "fedexp-m": fedexp_m,
    "fedprox": fedprox,
    "fedprox-exp": fedprox_exp,
    "scaffold": scaffold,
    "scaffold-exp": scaffold_exp,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
}
