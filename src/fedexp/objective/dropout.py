"""Dropout that draws from a generator of its own, so that threads do not disturb each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 2**16  # a decision takes 16 of the 64 bits of a draw, so a draw serves four


class OwnDropout(nn.Dropout):
    """As `nn.Dropout`; the probability is exact to 1 / 65,536, and it draws a quarter as often."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator()

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        count = input.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64)
        draws.random_(-(2**63), None, generator=self.generator)
        # in the order in which the input lies in memory, channels last or not
        order = torch.empty_like(input).stride()
        levels = draws.view(torch.int16)[:count].as_strided(input.shape, order)
        kept = levels >= round(self.p * LEVELS) - LEVELS // 2
        return input * (kept / (1 - self.p) if self.p < 1 else 0.0)


def with_own_dropout(module: nn.Module) -> list[OwnDropout]:
    """Replace every dropout layer in the module, and return those in their place."""
    found = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                found.append(OwnDropout(child.p).train(child.training))
                setattr(parent, name, found[-1])
    return found
