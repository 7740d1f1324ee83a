"""Which losses are torch's own, so that a kernel or written-out gradients may replace them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.errors import UsageError
from fedexp.objective.losses import ignored_target, try_loss


class Doubled(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


def test_only_the_plain_loss_has_a_kernel() -> None:
    plain = nn.CrossEntropyLoss(reduction="none", ignore_index=7)
    assert ignored_target(plain) == 7
    plain.register_forward_hook(lambda *_: None)
    others = [
        plain,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="none", weight=torch.ones(3)),
        Doubled(reduction="none"),
        F.cross_entropy,
    ]
    assert [ignored_target(loss) for loss in others] == [None] * len(others)


def test_a_loss_that_compares_each_with_each_inside_structures_is_refused() -> None:
    outputs, targets = {"scores": torch.zeros(2, 1)}, (torch.zeros(2), torch.zeros(2))
    with pytest.raises(UsageError, match="outputs and labels differ in shape"):
        try_loss(lambda out, y: F.mse_loss(out["scores"], y[0]), outputs, targets)
