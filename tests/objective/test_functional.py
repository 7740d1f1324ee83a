"""Layers written out for vmap are torch's own layers, statistics and hidden states included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedexp.objective.functional import FunctionalModule, in_plain_operations


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False, "num_layers": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, **options).double(), torch.randn(5, 6, 3).double()
    ours = in_plain_operations(layer)
    assert type(ours) is not kind
    for given in (x, x[0]):  # a batch, and a single sequence
        for one, other in zip(flat(ours(given)), flat(layer(given)), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
def test_projections_relu_and_a_given_state() -> None:
    torch.manual_seed(0)
    lstm, rnn = nn.LSTM(3, 4, proj_size=2), nn.RNN(3, 4, nonlinearity="relu")
    x, h = torch.randn(5, 6, 3), torch.randn(1, 6, 4)
    state = (torch.randn(1, 6, 2), torch.randn(1, 6, 4))
    for one, other in zip(
        flat(in_plain_operations(lstm)(x, state)), flat(lstm(x, state)), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(in_plain_operations(rnn)(x, h)[0], rnn(x, h)[0])


def flat(result: Any) -> list[Tensor]:
    output, last = result
    return [output, *(last if isinstance(last, tuple) else (last,))]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (lambda: nn.BatchNorm1d(3), (6, 3)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 5)),
        (lambda: nn.BatchNorm1d(3, affine=False), (6, 3)),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), (6, 3)),
        (lambda: nn.InstanceNorm2d(3, affine=True), (4, 3, 5, 5)),
    ],
)
def test_normalisation_beside_half_precision(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer = build()
    ours = in_plain_operations(layer, mixed=True)
    assert type(ours) is not type(layer)
    for _ in range(3):
        x = 2 + torch.randn(shape)
        torch.testing.assert_close(ours(x), layer(x))
    for one, other in zip(ours.buffers(), layer.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(ours.eval()(x), layer.eval()(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16


def test_a_module_is_as_it_was_after_a_call() -> None:
    inner = nn.Linear(2, 2)
    module = nn.Sequential(inner, inner)
    before = [inner.weight, inner.bias]
    function = FunctionalModule(module, ["0.weight", "0.bias"])
    output, _ = function([torch.zeros(2, 2), torch.ones(2)], torch.ones(1, 2))
    assert output.tolist() == [[1.0, 1.0]]
    assert inner.weight is before[0]
    assert inner.bias is before[1]
