"""Stacked layers: which models have them, and the reasons why some have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedexp.kernels.launch import differentiable
from fedexp.kernels.layers import sum_parts
from fedexp.models import cifar_cnn, emnist_cnn, resnet18
from fedexp.objective.base import flatten
from fedexp.objective.stack import STACKED, CannotStackError, Stack, StackedClients, stacked


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


class Summed(torch.autograd.Function):
    """A product with a vector per client whose gradient is summed from parts, as by a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.unflatten(0, (len(weight), -1)) * weight[:, None]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        parts = (dy * x).unflatten(0, (len(weight), -1))
        dx = (dy.unflatten(0, (len(weight), -1)) * weight[:, None]).flatten(0, 1)
        return dx, sum_parts(parts[None], weight)[0]


class Gain(nn.Embedding):
    """One vector, by which rows are multiplied; takes [K, 1, E] as well."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight if self.weight.ndim == 2 else self.weight[:, 0]
        return differentiable(Summed, input, weight)


class Repeated(nn.Module):
    """Layers that are called once, twice, three times or never, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(7, 16), nn.LSTM(16, 16, batch_first=True)
        self.dense, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.gain, self.once, self.unused = Gain(1, 16), Gain(1, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.recurrent(self.words(x) + self.words(x.flip(1)))
        y, (h, _) = self.recurrent(self.frozen(self.dense(y).tanh()))
        for _ in range(3):
            h = self.gain(h[0])[None]
        out: Tensor = self.once(self.dense(y[:, -1]) + h[0])
        return out


def test_gradients_of_layers_that_are_called_more_than_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STACKED, Gain, Gain)
    torch.manual_seed(0)
    module, clients, batch = Repeated().double(), 2, 3
    trained = [p for p in module.parameters() if p.requires_grad]
    fields = {"x": torch.randint(7, (clients, batch, 4)), "y": torch.randint(16, (clients, batch))}
    losses = nn.CrossEntropyLoss(reduction="none")
    start = flatten([p.detach() for p in trained])
    found = StackedClients(Stack(module, losses), start, clients)
    counted = torch.full((clients, batch), 1 / batch, dtype=torch.float64)
    for _ in range(2):  # the second time over the first one's gradients
        rows = found.layers.unpack(found.gradients(fields, counted))
        for client, row in enumerate(rows):
            loss = losses(module(fields["x"][client]), fields["y"][client]).mean()
            grads = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(row, flatten(list(grads)))
