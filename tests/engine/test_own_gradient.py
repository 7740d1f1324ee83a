"""Gradients that layers write where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedexp.objective import ModuleObjective
from fedexp.objective.own_gradient import LARGE, OwnGradient, OwnLinear, own_linears
from fedexp.objective.private import PrivateCopy


class Twice(nn.Module):
    """The same large layer twice, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.unused = nn.Linear(320, 320), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.same(self.same(x).tanh())
        return out


def build(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(400, 300, bias), nn.ReLU(), nn.Linear(300, 4)).double()


@pytest.mark.parametrize("examples", [1, 20, 65])
@pytest.mark.parametrize(
    "make", [build, lambda: build(False), lambda: Twice().double()], ids=["plain", "bias", "twice"]
)
def test_same_gradient_step_after_step(make, examples: int) -> None:  # type: ignore[no-untyped-def]
    objective = ModuleObjective(make)
    copy, (params, buffers) = PrivateCopy(objective).objective, objective.initial(0)
    assert any(isinstance(m, OwnLinear) for m in copy.module.modules())
    for step in range(3):
        width = 320 if make().__class__ is Twice else 400
        x = torch.randn(examples, width, dtype=torch.float64)
        batch = {"x": x, "y": torch.arange(examples) % 4}
        one, other = (o.gradient(params, buffers, batch)[0] for o in (objective, copy))
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-13)
        params = params - 0.1 * (step + 1) * one


def test_a_large_gradient_is_written_once() -> None:
    objective = ModuleObjective(build)
    copy, (params, buffers) = PrivateCopy(objective).objective, objective.initial(0)
    batch = {"x": torch.randn(5, 400, dtype=torch.float64), "y": torch.arange(5) % 4}
    first = copy.gradient(params, buffers, batch)[0]
    again = copy.gradient(params, buffers, batch)[0]
    assert again.data_ptr() == first.data_ptr()
    written = torch.autograd.grad(copy.module(batch["x"]).sum(), copy.params)  # by the layer itself
    assert written[0].data_ptr() == first.data_ptr()
    copy.gradient(params, buffers, batch)  # frees what was taken
    gradient = copy.join.__self__  # type: ignore[attr-defined]
    slot = gradient.slot(copy.params[0])
    assert slot.data_ptr() == first.data_ptr()
    assert gradient.slot(copy.params[0]).data_ptr() != first.data_ptr()  # taken


def test_small_layers_and_hooked_ones_stay() -> None:
    model = nn.Sequential(nn.Linear(LARGE - 1, 1), *(nn.Linear(LARGE, 1) for _ in range(5)))
    model[1].register_forward_hook(lambda *_: None)
    model[2].register_full_backward_pre_hook(lambda *_: None)
    model[3].forward = lambda x: x
    model[4].requires_grad_(False)
    own_linears(model, OwnGradient(list(model.parameters())))
    assert [type(m) for m in model] == [nn.Linear] * 5 + [OwnLinear]


def test_a_gradient_may_be_differentiated() -> None:
    model, x = build(), torch.randn(5, 400, dtype=torch.float64, requires_grad=True)

    def penalty() -> tuple[Tensor, ...]:
        slope = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), list(model[0].parameters()))

    plain = penalty()
    own_linears(model, OwnGradient(list(model.parameters())))
    assert model[0].in_features == 400
    torch.testing.assert_close(penalty(), plain)
