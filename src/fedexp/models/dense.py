"""Models without convolutions: logistic regression and the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedexp.errors import require


def logistic(inputs: int, classes: int) -> nn.Sequential:
    """Multinomial logistic regression: one linear layer on the flattened example.

    >>> sum(p.numel() for p in logistic(784, 10).parameters())
    7850
    """
    return mlp(inputs, (), classes)


def mlp(inputs: int, hidden: int | Sequence[int], classes: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers, on the flattened example.

    Args:
        inputs: numbers in an example, e.g. 784 for 28x28 pixels.
        hidden: units of the hidden layer, or of each of several.
        classes: number of outputs.

    >>> mlp(64, 32, 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    widths = (inputs, *((hidden,) if isinstance(hidden, int) else hidden), classes)
    require(min(widths) >= 1, f"every layer needs at least one unit, but the widths are {widths}")
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU() if layers else nn.Flatten(), nn.Linear(before, after)]
    return nn.Sequential(*layers)
