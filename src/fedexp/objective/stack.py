"""`Stack`: the loss of a module for many clients at once, by way of its stacked layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedexp.kernels.fuse import fused
from fedexp.kernels.launch import compiling_together, has_triton
from fedexp.objective.flat import pieces
from fedexp.objective.stacked_layers import computes_exactly, stacked

Losses = Callable[[Tensor, Tensor], Tensor]


class Stack:
    """Parameters are [K, d], examples [K, B, ...].

    Args:
        module: the model of one client.
        losses: a loss for every example of (outputs, y).
        compute_type: what layers compute in; normalisations keep their weights in full precision.
        fuse: let `torch.compile` merge what lies between the layers.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        compute_type: torch.dtype | None = None,
        fuse: bool = False,
    ) -> None:
        self.module, self.losses, self.compute_type = stacked(module), losses, compute_type
        self.names = [name for name, _ in module.named_parameters()]
        self.like = list(module.parameters())
        self.exact = [computes_exactly(module, name) for name in self.names]
        self.losses_of = fused(self._losses_of) if fuse else self._losses_of

    def compile(self, params: Tensor, x: Tensor, y: Tensor, counted: Tensor) -> None:
        """Have the kernels of `gradients` compiled, all at once, where there are any."""
        if params.is_cuda and has_triton():
            with compiling_together() as able:
                if able:
                    compiled, self.losses_of = self.losses_of, self._losses_of
                    weights = [w.detach().requires_grad_() for w in self._weights(params)]
                    self.slopes(weights, x, y, counted)
                    self.losses_of = compiled

    def slopes(
        self, weights: Sequence[Tensor], x: Tensor, y: Tensor, counted: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradient for each weight; none where the loss does not depend on it."""
        with torch.enable_grad():
            losses = self.losses_of(weights, x, y, counted.dtype)
            return torch.autograd.grad(losses, weights, counted.flatten(), allow_unused=True)

    def _losses_of(
        self, weights: Sequence[Tensor], x: Tensor, y: Tensor, kind: torch.dtype
    ) -> Tensor:
        """The loss of every example, client after client, [K * B]."""
        return self.losses(self.forward(weights, x.flatten(0, 1)).to(kind), y.flatten(0, 1))

    def forward(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """The outputs of K models on K times as many examples, [K * B]."""
        if self.compute_type is not None and x.is_floating_point():
            x = x.to(self.compute_type)
        out: Tensor = functional_call(
            self.module, dict(zip(self.names, weights, strict=True)), (x,)
        )
        return out

    def _weights(self, params: Tensor) -> list[Tensor]:
        """Views of the parameters, of a copy in the type layers compute in where that differs."""
        views = pieces(params.to(self.compute_type or params.dtype), self.like)
        if self.compute_type is None:
            return views
        whole = pieces(params, self.like)
        return [w if e else v for v, w, e in zip(views, whole, self.exact, strict=True)]
