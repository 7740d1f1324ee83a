"""Which losses are torch's own, so that a kernel or written-out gradients may replace them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.objective.losses import ignored_target


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
