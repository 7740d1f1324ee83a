"""Dense networks: what counts as one, and the gradient in its factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedexp.objective import ModuleObjective


def shared_weights() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    "objective",
    [
        ModuleObjective(shared_weights),
        ModuleObjective(frozen),
        ModuleObjective(hooked),
        ModuleObjective(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU())),
        ModuleObjective(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout())),
        ModuleObjective(nn.Linear(4, 3), nn.MSELoss(reduction="none"), classifies=False),
        ModuleObjective(nn.Linear(4, 3), nn.CrossEntropyLoss(torch.ones(3), reduction="none")),
        ModuleObjective(
            nn.Linear(4, 3), nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
        ),
    ],
)
def test_what_is_not_a_plain_dense_classifier(objective: ModuleObjective) -> None:
    assert objective.dense_network() is None


def test_the_product_of_the_factors_is_the_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    objective = ModuleObjective(module)
    network = objective.dense_network()
    assert network is not None
    params, buffers = objective.initial(0)
    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    expected, _ = objective.gradient(params.clone(), buffers, {"x": x, "y": y})
    counted = torch.full((1, 7), 1 / 7, dtype=torch.float64)
    factors = network.factors(network.split(params[None]), x[None], y[None], counted)
    grads = [torch.bmm(errors.mT, inputs) for inputs, errors in factors]
    torch.testing.assert_close(network.join(grads)[0], expected)
