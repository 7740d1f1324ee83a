"""`ServerRule`, the base class of server rules, and the descent step they all take."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import is_number, require
from fedexp.precision import widest

State = Mapping[str, Tensor]
"""State of a server rule: tensors by name."""
Metrics = Mapping[str, Tensor]
"""Metrics of a server step: scalar tensors by name, e.g. `server_lr` and `diversity`."""
Step = tuple[Tensor, State, Metrics]


class ServerRule(abc.ABC):
    """A pure rule that turns the sums of a round into the next model.

    Rules are frozen dataclasses: nothing on them changes, their state is returned. State and
    metrics are dictionaries of tensors, so a checkpoint needs no knowledge of the rule and a step
    can run on a device without waiting for the host. Every rule reports `server_lr`.

    `average_last` is the number of last iterates that the output model averages, unless the
    algorithm sets another (docs/paper.md#output-model).
    `reads_norms` is whether `step` reads the squared norms in the sums. Central privacy releases
    them with more noise on everything; to a rule that does not read them they are NaN. It is not
    inherited, because a subclass may read more: True unless the class itself sets it.
    """

    average_last: ClassVar[int] = 1
    reads_norms: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.reads_norms = vars(cls).get("reads_norms", True)

    def init(self, params: Tensor) -> State:
        """Return the state before the first round."""
        return {}

    @abc.abstractmethod
    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        """Return the next parameters, the next state, and metrics."""

    def lr_bounds(self) -> tuple[float, float] | None:
        """Return the smallest and largest `lr` of the rule; None for any positive one."""
        return None

    def with_step_bound(self, most: float) -> Self:
        """Return the rule with steps of at most `most`, unless it has a bound or a fixed length."""
        return self

    def released(self, lr_decay: float) -> Self:
        """Return the rule as the authors' released code has it (docs/paper.md#released-code).

        Args:
            lr_decay: factor on the clients' step size after every round.
        """
        return self


def descend(params: Tensor, direction: Tensor, lr: Tensor | float) -> Tensor:
    """Return `params - lr * direction`, in the type of `params` (eq. 4, docs/paper.md#server-step).

    Every rule calls this, so rules with equal steps give equal bits.
    """
    params = vector(params)
    return (params - lr * direction).to(params.dtype)


def vector(params: Any) -> Tensor:
    """Return parameters, given as a tensor, an array or a list, as a tensor."""
    return torch.as_tensor(params)


def scalar(value: float, like: Any) -> Tensor:
    """Return a scalar on the device of `like`, in float64 where the device has it."""
    # filled on the device: copies from the host are not allowed while a CUDA graph is captured
    device = vector(like).device
    return torch.full((), value, dtype=widest(device), device=device)


def require_positive(name: str, value: float) -> None:
    """Raise `UsageError` unless the value is positive and finite."""
    valid = is_number(value) and value > 0
    require(valid, f"{name} must be positive and finite, not {value!r}")


def require_fraction(name: str, value: float) -> None:
    """Raise `UsageError` unless the value is in [0, 1)."""
    require_numbers(**{name: value})
    require(0 <= value < 1, f"{name} must be in [0, 1), not {value}")


def require_numbers(**values: float) -> None:
    """Raise `UsageError` unless all values are numbers; infinity is one, NaN is not."""
    for name, value in values.items():
        valid = isinstance(value, Real) and not isinstance(value, bool) and value == value
        require(valid, f"{name} must be a number, not {value!r}")
