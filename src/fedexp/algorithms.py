"""Algorithms: a client rule and a server rule. Any client rule works with any server rule.

>>> scaffold_exp(eps=0.01) == Algorithm("scaffold-exp", client=Scaffold(), server=ExP(eps=0.01))
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.client import SGD, ClientRule, Nova, Prox, ProxEnvelope, Scaffold, zero_extras
from fedexp.clipping import (
    MEDIAN,
    Limits,
    clip_metrics,
    clipped_values,
    next_medians,
    split_medians,
)
from fedexp.errors import is_number, require, whole_number
from fedexp.local import LocalTraining, Schedule, check_schedule, init_kept_state
from fedexp.server import (
    AMS,
    Adagrad,
    Adam,
    Average,
    ExP,
    Hypergradient,
    Momentum,
    MomentumExP,
    NormalisedAverage,
    ServerRule,
    StochasticPolyak,
    Yogi,
)
from fedexp.server.base import State, Step, scalar
from fedexp.server.extrapolation import EpsMode


@dataclass(frozen=True)
class Algorithm:
    """A client rule, a server rule, and how many iterates the output model averages.

    Args:
        name: its name in records and tables.
        client: the client rule.
        server: the server rule.
        average_last: the output model is the mean of this many last iterates; None leaves it to
            the server rule (2 for the extrapolating ones, else 1). Training never sees the mean.
        bound: what a client adds to the sums is clipped to this many times the median over clients
            (`fedexp.clipping`, docs/untrusted-clients.md), at least 1; None does not clip.
        server_schedule: factor on the step of the server rule, whatever its length, in round t of
            T: "constant"; "linear", 1 - (t-1)/T; "cosine", (1 + cos(π (t-1)/T)) / 2; or a function
            of the round. `server_lr` reports the step that is taken.
    """

    name: str = "custom"
    client: ClientRule = field(default_factory=SGD)
    server: ServerRule = field(default_factory=Average)
    average_last: int | None = None
    bound: float | None = None
    server_schedule: Schedule | Callable[[int], float] = "constant"

    def __post_init__(self) -> None:
        check_schedule("server_schedule", self.server_schedule)
        for what, rule, base in (
            ("client", self.client, ClientRule),
            ("server", self.server, ServerRule),
        ):
            name = rule.__name__ if isinstance(rule, type) else type(rule).__name__
            remedy = f"call it: {name}(...)" if isinstance(rule, type) else "give an instance"
            require(
                isinstance(rule, base),
                f"the {what} rule of {self.name!r} is {name}, not a fedexp.{base.__name__}; "
                f"{remedy}",
            )
        if self.average_last is not None:
            whole_number("average_last", self.average_last, least=1)
        valid = self.bound is None or (is_number(self.bound) and self.bound >= 1)
        require(valid, f"bound is a number of medians, at least 1, not {self.bound!r}")

    @property
    def iterates(self) -> int:
        """The number of iterates that the output model averages (docs/paper.md#output-model)."""
        return self.server.average_last if self.average_last is None else self.average_last

    def init(self, params: Tensor, has_buffers: bool = False) -> State:
        """Return the state of the server before the first round: of its rule, and the medians."""
        state = self.server.init(params)
        if self.bound is None:
            return state
        names = clipped_values(zero_extras(self.client, params), params, has_buffers)
        return {**state, **{MEDIAN + name: scalar(0.0, params) for name in names}}

    def init_client_state(self, params: Tensor, local: LocalTraining) -> dict[str, Tensor]:
        """Return a client's state before its first round: of its rule, and `local.keep_state`."""
        return {**self.client.init_client_state(params), **init_kept_state(params, local)}

    def limits(self, state: State) -> Limits | None:
        """Return what clients are clipped to after a state; None where nothing is clipped."""
        if self.bound is None:
            return None
        _, medians = split_medians(state)
        numbers = {name.removeprefix(MEDIAN): float(value) for name, value in medians.items()}
        return Limits(self.bound, numbers)

    def step(self, params: Tensor, aggregate: Aggregate, state: State, factor: float = 1.0) -> Step:
        """Return the next parameters, the next state and metrics, as `ServerRule.step` does.

        `factor` is that of `server_schedule` in the round.
        """
        of_rule, medians = split_medians(state)
        after, next_state, metrics = self.server.step(params, aggregate, of_rule)
        if factor != 1:
            after = params + factor * (after - params)
            metrics = {n: factor * v if n == "server_lr" else v for n, v in metrics.items()}
        if not medians:
            return after, next_state, metrics
        next_state = {**next_state, **next_medians(medians, aggregate)}
        return after, next_state, {**metrics, **clip_metrics(aggregate)}


def fedavg(lr: float = 1.0) -> Algorithm:
    """Return FedAvg with a server step size (McMahan et al., 2017; eq. 4)."""
    return Algorithm("fedavg", server=Average(lr))


RECOMMENDED_EPS = 0.05  # relative to the mean squared norm: docs/eps-study.md


def fedexp(
    eps: float | None = None,
    eps_mode: EpsMode | None = None,
    bound: float | None = None,
    **options: Any,
) -> Algorithm:
    """Return FedExP (Algorithm 1): the server steps further when clients disagree.

    With an eps it is the printed form. Without one, eps is relative to the mean squared norm, so
    that there is nothing to tune (docs/extrapolation.md).

    >>> fedexp().server.eps_mode, fedexp(eps=0.1).server.eps_mode
    ('relative', 'absolute')
    """
    eps, eps_mode = eps_and_mode(eps, eps_mode)
    return Algorithm("fedexp", server=ExP(eps, eps_mode=eps_mode, **options), bound=bound)


def eps_and_mode(eps: float | None, mode: EpsMode | None) -> tuple[float, EpsMode]:
    """Return FedExP's eps and its mode, where either may not be given.

    >>> eps_and_mode(None, None), eps_and_mode(0.1, None), eps_and_mode(None, "participants")
    ((0.05, 'relative'), (0.1, 'absolute'), (0.001, 'participants'))
    """
    mode = mode or ("relative" if eps is None else "absolute")
    return default_eps(mode) if eps is None else eps, mode


def default_eps(mode: EpsMode) -> float:
    """Return the eps that a mode has where none is given."""
    return RECOMMENDED_EPS if mode == "relative" else ExP.eps


def fedavgm(lr: float = 1.0, beta: float = 0.9, nesterov: bool = False) -> Algorithm:
    """Return FedAvg with server momentum (Hsu et al., 2019)."""
    return Algorithm("fedavgm", server=Momentum(lr, beta, nesterov))


def diloco(lr: float = 0.7, beta: float = 0.9) -> Algorithm:
    """Return DiLoCo's outer optimiser (Douillard et al., 2023): Nesterov's momentum.

    Local training is the task's own, as with every algorithm; the published one is `diloco_local`:
    `simulate(task, diloco(), local=diloco_local())`.
    """
    return Algorithm("diloco", server=Momentum(lr, beta, nesterov=True))


def diloco_local(
    lr: float = 4e-4, steps: int | None = 500, warmup_steps: int = 1000, **options: Any
) -> LocalTraining:
    """Return DiLoCo's local training: AdamW whose state is kept, with one schedule over the run.

    Batches of 512, weight decay 0.1, linear warm-up, then a cosine to 0 at the end of the run, as
    published; betas (0.9, 0.95) and clipping at norm 1 are those of OpenDiLoCo's released code,
    whose warm-up starts one step lower, at 0. `options` replaces any of them.

    >>> diloco_local(steps=20, warmup_steps=10, batch_size=8).keep_state
    True
    """
    published: dict[str, Any] = {
        **{"lr": lr, "steps": steps, "batch_size": 512, "clip_norm": 1.0, "keep_state": True},
        **{"optimizer": "adamw", "betas": (0.9, 0.95), "weight_decay": 0.1},
        **{"step_schedule": "cosine", "step_schedule_over": "run", "warmup_steps": warmup_steps},
    }
    return LocalTraining(**{**published, **options})


def fedexp_m(eps: float = 1e-3, beta: float = 0.9, **options: Any) -> Algorithm:
    """Return FedExP with server momentum (App. F)."""
    return Algorithm("fedexp-m", server=MomentumExP(eps, beta=beta, **options))


def fedprox(mu: float = 0.1, lr: float = 1.0) -> Algorithm:
    """Return FedProx (Li et al., 2020)."""
    return Algorithm("fedprox", client=Prox(mu), server=Average(lr))


def fedprox_exp(mu: float = 0.1, eps: float = 1e-3, **options: Any) -> Algorithm:
    """Return FedProx with extrapolation."""
    return Algorithm("fedprox-exp", client=Prox(mu), server=ExP(eps, **options))


def scaffold(lr: float = 1.0) -> Algorithm:
    """Return SCAFFOLD (Karimireddy et al., 2020), option II."""
    return Algorithm("scaffold", client=Scaffold(), server=Average(lr))


def scaffold_exp(eps: float = 1e-3, **options: Any) -> Algorithm:
    """Return SCAFFOLD with extrapolation (Algorithm 2)."""
    return Algorithm("scaffold-exp", client=Scaffold(), server=ExP(eps, **options))


def fedadagrad(lr: float = 0.1, tau: float = 1e-3, **options: Any) -> Algorithm:
    """Return FedAdagrad (Reddi et al., 2021)."""
    return Algorithm("fedadagrad", server=Adagrad(lr, tau, **options))


def fedadam(lr: float = 0.01, tau: float = 1e-3, **options: Any) -> Algorithm:
    """Return FedAdam (Reddi et al., 2021)."""
    return Algorithm("fedadam", server=Adam(lr, tau, **options))


def fedyogi(lr: float = 0.01, tau: float = 1e-3, **options: Any) -> Algorithm:
    """Return FedYogi (Reddi et al., 2021)."""
    return Algorithm("fedyogi", server=Yogi(lr, tau, **options))


def fedams(lr: float = 0.01, tau: float = 1e-6, **options: Any) -> Algorithm:
    """Return FedAMS (Wang, Lin and Chen, 2022): FedAdam with the maximum of its second moment."""
    return Algorithm("fedams", server=AMS(lr, tau, **options))


def fedexprox(mu: float = 0.1, lr: float = 1.0) -> Algorithm:
    """Return FedExProx with a constant step (Li et al., 2024): FedProx, extrapolated.

    Clients approximate the proximal operator of γ F_i by local training with μ = 1/γ, and the
    server steps by lr > 1, the paper's α, times their mean change.
    """
    return Algorithm("fedexprox", client=Prox(mu), server=Average(lr))


def fedexprox_grads(mu: float = 0.1, **options: Any) -> Algorithm:
    """Return FedExProx-GraDS: the step is the diversity of the clients' proximal steps, at least 1.

    It is mean ||Δ_i||² / ||mean Δ_i||²: FedProx-ExP with factor 1 and without eps, and the last
    iterate is returned.
    """
    server = ExP(**{"eps": 0.0, "factor": 1.0, **options})
    return Algorithm("fedexprox-grads", client=Prox(mu), server=server, average_last=1)


def fedexprox_stops(mu: float = 0.1, inf: float = 0.0, **options: Any) -> Algorithm:
    """Return FedExProx-StoPS: the step is the stochastic Polyak step of the Moreau envelopes."""
    client = ProxEnvelope(mu, inf)
    return Algorithm("fedexprox-stops", client=client, server=StochasticPolyak(**options))


def fedhyper(lr: float = 1.0, **options: Any) -> Algorithm:
    """Return FedHyper-G (Wang, Wang and Li, 2024): the step size follows its own gradient."""
    return Algorithm("fedhyper", server=Hypergradient(lr, **options))


def fednova(lr: float = 1.0) -> Algorithm:
    """Return FedNova (Wang et al., 2020): updates are normalised by the work of their clients."""
    return Algorithm("fednova", client=Nova(), server=NormalisedAverage(lr))


# Names are resolved at the command line only.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedexp": fedexp,
    "fedavgm": fedavgm,
    "diloco": diloco,
    "fedexp-m": fedexp_m,
    "fedprox": fedprox,
    "fedprox-exp": fedprox_exp,
    "scaffold": scaffold,
    "scaffold-exp": scaffold_exp,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedams": fedams,
    "fedexprox": fedexprox,
    "fedexprox-grads": fedexprox_grads,
    "fedexprox-stops": fedexprox_stops,
    "fedhyper": fedhyper,
    "fednova": fednova,
}
