"""A local step of many dense networks, straight from the factors of their gradients.

    w ← (1 - η λ) w - η c (g + pull (w - w⁰) + push),    c = min(1, bound / norm)

Without clipping g is never written down: its factors are multiplied into the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.aggregate import norms
from fedexp.client import Drift
from fedexp.local import LocalTraining
from fedexp.objective.dense import DenseNetwork, Factors


@dataclass(frozen=True, eq=False)
class DenseStep:
    """Moves weights in place.

    Attributes:
        lr: η.
        local: the weight decay λ and the bound of clipping.
        pull: of the client rule's correction.
        constant: push - pull w⁰ for each of the weights, or nothing.
    """

    lr: float
    local: LocalTraining
    pull: float
    constant: Sequence[Tensor]

    @classmethod
    def of(
        cls, network: DenseNetwork, start: Tensor, lr: float, local: LocalTraining, drift: Drift
    ) -> DenseStep:
        """The step of clients that begin at `start` [d] and add `drift`."""
        constant = drift.push
        if drift.pull:
            behind = -drift.pull * start
            constant = behind if constant is None else constant + behind
        return cls(lr, local, drift.pull, [] if constant is None else network.split(constant))

    def __call__(self, weights: Sequence[Tensor], factors: Sequence[Factors]) -> None:
        """Move the weights, [K, O, F] each, of the first K clients."""
        constant = [c[: len(weights[0])] if c.ndim == 3 else c for c in self.constant]
        if self.local.clip_norm is None:
            self._move(weights, factors, constant)
        else:
            self._move_clipped(weights, factors, constant, self.local.clip_norm)

    def _move(
        self, weights: Sequence[Tensor], factors: Sequence[Factors], constant: Sequence[Tensor]
    ) -> None:
        keep = 1 - self.lr * (self.local.weight_decay + self.pull)
        for weight, (inputs, errors) in zip(weights, factors, strict=True):
            weight.baddbmm_(errors.mT, inputs, beta=keep, alpha=-self.lr)
        for weight, shift in zip(weights, constant, strict=False):
            weight.sub_(shift, alpha=self.lr)

    def _move_clipped(
        self,
        weights: Sequence[Tensor],
        factors: Sequence[Factors],
        constant: Sequence[Tensor],
        bound: float,
    ) -> None:
        grads = [torch.bmm(errors.mT, inputs) for inputs, errors in factors]
        for weight, grad in zip(weights, grads, strict=True):
            if self.pull:
                grad.add_(weight, alpha=self.pull)
        for grad, shift in zip(grads, constant, strict=False):
            grad.add_(shift)
        norm = torch.linalg.vector_norm(torch.stack([norms(g.flatten(1)) for g in grads]), dim=0)
        rate = self.lr * (bound / norm).clamp(max=1.0)
        rate = rate.to(grads[0].dtype)[:, None, None]
        for weight, grad in zip(weights, grads, strict=True):
            if self.local.weight_decay:
                weight.mul_(1 - self.lr * self.local.weight_decay)
            weight.addcmul_(grad, rate, value=-1)
