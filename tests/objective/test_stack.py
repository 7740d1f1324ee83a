"""Stacked layers: which models have them, and the reasons why some have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedexp.models import cifar_cnn, emnist_cnn, resnet18
from fedexp.objective.stack import CannotStackError, stacked


class Scaled(nn.Module):
    """A weight that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.layer(x)
        return out


@pytest.mark.parametrize("build", [lambda: resnet18(10), emnist_cnn, cifar_cnn])
def test_the_papers_models_can_be_stacked(build: Callable[[], nn.Module]) -> None:
    assert stacked(build())


def test_a_model_that_cannot_be_stacked_gets_the_reason() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    odd = nn.Conv2d(4, 4, 3, groups=2)
    for module, reason in (
        (tied, "share"),
        (frozen, "frozen"),
        (odd, "plain"),
        (nn.BatchNorm1d(3), "buffers"),
        (Scaled(), "Scaled"),
    ):
        with pytest.raises(CannotStackError, match=reason):
            stacked(module)


def test_frozen_layers_are_common_to_all_clients() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).requires_grad_(True)
    model[0].requires_grad_(False)
    copy = stacked(model)
    weights = {"1.weight": torch.randn(2, 3, 4), "1.bias": torch.randn(2, 3)}
    tokens = torch.tensor([0, 1, 2, 3])  # two of each client
    rows = torch.func.functional_call(copy, weights, (tokens,))
    for client in range(2):
        own = slice(2 * client, 2 * client + 2)
        weight, bias = weights["1.weight"][client], weights["1.bias"][client]
        expected = nn.functional.linear(model[0](tokens[own]), weight, bias)
        torch.testing.assert_close(rows[own], expected)
