"""What a server rule is, and the one step they all take."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require

State = Mapping[str, Tensor]
Metrics = Mapping[str, Tensor]
Step = tuple[Tensor, State, Metrics]


class ServerRule(abc.ABC):
    """A pure rule that turns the sums of a round into the next model.

    Rules are frozen dataclasses: nothing on them changes, their state is returned. State and
    metrics are dictionaries of tensors, so a checkpoint needs no knowledge of the rule and a step
    can run on a device without waiting for the host. Every rule reports `server_lr`.

    `average_last` is how many of the last iterates make the output model unless the algorithm
    says otherwise.
    """

    average_last: ClassVar[int] = 1

    def init(self, params: Tensor) -> State:
        """The state before the first round."""
        return {}

    @abc.abstractmethod
    def step(self, params: Tensor, aggregate: Aggregate, state: State) -> Step:
        """The next parameters, the next state, and metrics."""


def descend(params: Tensor, direction: Tensor, lr: Tensor | float) -> Tensor:
    """`params - lr * direction`, in the type of `params` (eq. 4).

    Every rule ends here, so that rules that agree on the numbers agree on every bit.
    """
    params = vector(params)
    return (params - lr * direction).to(params.dtype)


def vector(params: Any) -> Tensor:
    """The parameters as a tensor; arrays and lists will do."""
    return torch.as_tensor(params)


def scalar(value: float, like: Any) -> Tensor:
    """A float64 number on the device of `like`."""
    # filled there: a number of the host's cannot be copied while a graph is captured
    return torch.full((), value, dtype=torch.float64, device=vector(like).device)


def require_positive(name: str, value: float) -> None:
    """Refuse a learning rate or similar that is not a positive, finite number."""
    require(math.isfinite(value) and value > 0, f"{name} must be positive and finite, not {value}")


def require_fraction(name: str, value: float) -> None:
    """Refuse a decay or momentum outside [0, 1)."""
    require(0 <= value < 1, f"{name} must lie in [0, 1), not {value}")
