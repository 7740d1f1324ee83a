"""A gradient that large layers write where it belongs, in memory that every step uses again.

Joining the gradients of all layers to a vector, as the loop does, writes the largest twice and each
time to new memory, which takes longer than the product that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.objective.flat import pieces

LARGE = 100_000  # weights of a layer
FEW = 64  # examples, for which MKL is quicker with the weights as its left factor


class OwnGradient:
    """The gradient of a model, for one step at a time: the next step overwrites it.

    >>> weight = nn.Parameter(torch.zeros(1, 2))
    >>> OwnGradient([weight]).joined([torch.ones(1, 2)]).tolist()
    [1.0, 1.0]
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._vector = torch.empty(0)
        self._slots: list[Tensor] = []
        self._free: dict[int, Tensor] = {}

    def slot(self, weight: Tensor) -> Tensor:
        """Where to write a weight's gradient. A second one in a step, which autograd adds to the
        first, is written elsewhere.
        """
        slot = self._free.pop(id(weight), None)
        return torch.empty_like(weight) if slot is None or slot.dtype != weight.dtype else slot

    def joined(self, grads: Sequence[Tensor]) -> Tensor:
        """All gradients of a step as a vector."""
        if self._vector.dtype != grads[0].dtype or not self._slots:
            size = sum(param.numel() for param in self._params)
            self._vector = torch.empty(size, dtype=grads[0].dtype)
            self._slots = pieces(self._vector, self._params)
        for slot, grad in zip(self._slots, grads, strict=True):
            if grad.data_ptr() != slot.data_ptr():
                slot.copy_(grad)
        self._free = {id(p): slot for p, slot in zip(self._params, self._slots, strict=True)}
        return self._vector


class OwnLinear(nn.Linear):
    """`nn.Linear` whose weight's gradient goes to its slot."""

    gradient: OwnGradient

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 2 or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        out: Tensor = _Product.apply(input, self.weight, self.gradient)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: OwnGradient) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot = lambda: gradient.slot(weight)
        # in the usual order, in which dropout draws
        return (weight @ x.t()).t().contiguous() if len(x) <= FEW else x @ weight.t()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        before = error @ weight if ctx.needs_input_grad[0] else None
        # a gradient that is itself differentiated must not be written to memory that changes
        slot = None if torch.is_grad_enabled() else ctx.slot()
        return before, torch.mm(error.t(), x, out=slot), None


def own_linears(module: nn.Module, gradient: OwnGradient) -> None:
    """Turn every large linear layer that is trained into one of that kind."""
    for layer in module.modules():
        if type(layer) is nn.Linear and _pays(layer) and not hooked(layer):
            # where it is: models ask layers for their sizes, and may know one by two names
            layer.__class__ = OwnLinear
            cast(OwnLinear, layer).gradient = gradient


def _pays(layer: nn.Linear) -> bool:
    return layer.weight.requires_grad and layer.weight.numel() >= LARGE


def hooked(module: nn.Module) -> bool:
    """Whether something else happens when the module is called, or on the way back."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in vars(module)
