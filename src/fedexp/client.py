"""Client rules: how a client corrects its gradient and what it adds to the sums.

A rule is a frozen dataclass of pure functions. Gradients and parameters may carry a leading
dimension of clients; everything here is elementwise, so the same rule serves a loop over clients
and a batched program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import is_number, require
from fedexp.precision import widest

Tensors = Mapping[str, Tensor]


class LinearCorrection(NamedTuple):
    """A correction that is linear in the parameters: g + prox (w - w⁰) + offset."""

    prox: float = 0.0
    offset: Tensor | None = None

    def apply(self, grad: Tensor, params: Tensor, start: Tensor) -> Tensor:
        """Return the corrected gradient at `params`, for a client that started at `start`."""
        if self.prox:
            grad = grad.add(params - start, alpha=self.prox)
        return grad if self.offset is None else grad + self.offset


@dataclass(frozen=True)
class ClientRule:
    """Base class of client rules: no state, no correction.

    A rule overrides `linear_correction` if its correction is linear in the parameters, which lets
    engines solve quadratic problems in closed form, and `correct` otherwise.

    `needs_sgd` states that the rule takes Δ / total_lr for a mean of gradients, which it is
    for SGD without momentum only; `simulate` refuses such a rule with another local optimiser.
    `needs_loss` states that `loss_extras` is to be called, for which the simulator evaluates every
    client on its own data after local training.
    """

    needs_sgd: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False

    def init_broadcast(self, params: Tensor) -> Tensors:
        """Return the initial state that the server broadcasts with the model."""
        return {}

    def init_client_state(self, params: Tensor) -> Tensors:
        """Return the initial state of a client, stored between the rounds it takes part in."""
        return {}

    def linear_correction(self, broadcast: Tensors, client_state: Tensors) -> LinearCorrection:
        """Return the correction, if it is linear in the parameters."""
        return LinearCorrection()

    @property
    def is_linear(self) -> bool:
        """Whether `linear_correction` is the whole correction."""
        return type(self).correct is ClientRule.correct

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: Tensors, client_state: Tensors
    ) -> Tensor:
        """Return the corrected gradient at `params`, for a client that started at `start`.

        The next step may overwrite `grad`: copy what must outlive a step.
        """
        correction = LinearCorrection(*self.linear_correction(broadcast, client_state))
        return correction.apply(grad, params, start)

    def end_round(
        self, delta: Tensor, total_lr: Tensor | float, broadcast: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return the new client state, and the extras that the client adds to the sums.

        Args:
            delta: Δ_i = w - w_i.
            total_lr: the sum of the step sizes: τ η_l where all are alike.
        """
        return {}, {}

    def loss_extras(self, loss: Tensor, delta: Tensor) -> Tensors:
        """Return further extras, [..., 1] each, where `needs_loss`.

        Args:
            loss: F_i(w_i) on all of the client's data, in evaluation mode, [..., 1].
            delta: Δ_i = w - w_i, [..., d].
        """
        return {}

    def weight_factor(self, total_lr: Tensor | float) -> Tensor | float | None:
        """Return the factor on the client's weight in all sums, of the shape of `total_lr`.

        None leaves the weights as they are. The mean of buffers has the weights without it.
        """
        return None

    def update_broadcast(
        self, broadcast: Tensors, aggregate: Aggregate, total_weight: float
    ) -> Tensors:
        """Return the new broadcast state; `total_weight` is the weight of all clients."""
        return broadcast


def zero_extras(rule: ClientRule, params: Tensor) -> Tensors:
    """Return what a client adds to the sums for a zero update: the names and shapes of extras."""
    zero = torch.zeros_like(params)
    states = rule.init_broadcast(params), rule.init_client_state(params)
    _, extras = rule.end_round(zero, 1.0, *states)
    return {**extras, **(rule.loss_extras(zero[:1], zero) if rule.needs_loss else {})}


@dataclass(frozen=True)
class SGD(ClientRule):
    """Plain local SGD (eq. 2, docs/paper.md#local-sgd)."""


@dataclass(frozen=True)
class Prox(ClientRule):
    """FedProx: the gradient of F_i(w) + (μ/2) ||w - w^t||².

    Args:
        mu: strength μ >= 0; 0 is plain SGD.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        require(is_number(self.mu) and self.mu >= 0, f"mu must be >= 0, not {self.mu!r}")

    def linear_correction(self, broadcast: Tensors, client_state: Tensors) -> LinearCorrection:
        return LinearCorrection(prox=self.mu)


@dataclass(frozen=True)
class ProxEnvelope(Prox):
    """The client of FedExProx-StoPS: FedProx that also reports its Moreau envelope.

    With γ = 1/μ the envelope of F_i at w^t is M_i = F_i(w_i) + ||Δ_i||² / (2γ), where w_i is the
    proximal operator, which local training approximates. The client adds
    γ (M_i - inf) = γ (F_i(w_i) - inf) + ||Δ_i||² / 2 to the sums, for `StochasticPolyak`. F_i is
    the task's loss. On least squares it is twice what the local gradient descends
    (docs/paper.md#half-gradient), and steps come out up to twice as long.

    Args:
        mu: μ = 1/γ > 0.
        inf: the infimum of F_i, which is that of M_i: 0 where a client can fit its data.
    """

    needs_loss: ClassVar[bool] = True

    inf: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = is_number(self.mu) and self.mu > 0
        require(valid, f"mu must be > 0, not {self.mu!r}: it is 1 / gamma of the envelope")
        require(is_number(self.inf), f"inf must be a finite number, not {self.inf!r}")

    def loss_extras(self, loss: Tensor, delta: Tensor) -> Tensors:
        length = torch.linalg.vector_norm(delta, dim=-1, keepdim=True, dtype=widest(delta.device))
        return {"envelope": (loss - self.inf) / self.mu + length.square() / 2}


@dataclass(frozen=True)
class Nova(ClientRule):
    """The client of FedNova (Wang et al., 2020), for clients that do unequal work.

    a_i is the work of a client: its number of local steps, or the sum of its step sizes where they
    change. Its weight p_i in all sums becomes p_i / a_i, so that the mean update is that of
    Δ_i / a_i: a client with more steps does not count more. (Buffers are averaged with the weights
    p_i.) It adds a_i and a_i² to the sums, from
    which `NormalisedAverage` computes the length of the step. With another server rule, e.g.
    `ExP`, the direction is FedNova's, and the length is that rule's own.

    a_i is that of plain SGD. The paper has others for local momentum, where this rule is refused,
    and for a proximal term.
    """

    needs_sgd: ClassVar[bool] = True

    def weight_factor(self, total_lr: Tensor | float) -> Tensor | float:
        return 1.0 / total_lr

    def end_round(
        self, delta: Tensor, total_lr: Tensor | float, broadcast: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        work = torch.ones_like(delta[..., :1], dtype=widest(delta.device)) * total_lr
        return {}, {"work": work, "sq_work": work.square()}


@dataclass(frozen=True)
class Scaffold(ClientRule):
    """SCAFFOLD, option II (Algorithm 2): the gradient is corrected by control variates.

    Locally w ← w - η_l (g - c_i + c). After τ steps Ψ_i = c - Δ_i / (τ η_l), c_i ← c_i - Ψ_i, and
    the server takes c ← c - sum_S p_i Ψ_i / sum_all p_i. With uniform weights that is
    c - (|S|/N) mean Ψ, so c stays the mean of all c_i under partial participation too
    (docs/paper.md#scaffold-partial-participation). Where step sizes change over the local steps,
    τ η_l is their sum. With momentum or Adam Δ_i / (τ η_l) would not be a mean of gradients, so the
    combination is refused.
    """

    needs_sgd: ClassVar[bool] = True

    def init_broadcast(self, params: Tensor) -> Tensors:
        return {"control": torch.zeros_like(params)}

    def init_client_state(self, params: Tensor) -> Tensors:
        return {"control": torch.zeros_like(params)}

    def linear_correction(self, broadcast: Tensors, client_state: Tensors) -> LinearCorrection:
        return LinearCorrection(offset=broadcast["control"] - client_state["control"])

    def end_round(
        self, delta: Tensor, total_lr: Tensor | float, broadcast: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        psi = broadcast["control"] - delta / total_lr
        return {"control": client_state["control"] - psi}, {"control": psi}

    def update_broadcast(
        self, broadcast: Tensors, aggregate: Aggregate, total_weight: float
    ) -> Tensors:
        change = aggregate.extras["control"] / total_weight
        return {"control": broadcast["control"] - change.to(broadcast["control"].dtype)}
