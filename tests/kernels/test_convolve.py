"""`convolve` as an operator of torch: its gradients, its fakes, and which operands are scaled.

On a CPU, where nothing is scaled by itself, with a form in plain torch for scaled operands.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fedexp.kernels import convolution, convolution_torch
from fedexp.kernels.convolution import convolve
from fedexp.kernels.convolution_torch import Geometry, OneByOne, Units, takes_scaled
from fedexp.precision import arithmetic
from tests.kernels.test_scaled import CLOSE
from tests.kernels.test_twins import BATCH, CLIENTS, each_alone, gap, problem

SHAPE = (16, 24, 9, 8, 3, 2, 1)


def by_plain_torch(
    direction: str, a: Tensor, b: Tensor, g: Geometry, units: Units | None = None, room: object = 0
) -> Tensor:
    """What the kernels give for convolution_torch operands; weights channels last, images not."""
    assert units is not None
    assert a.dtype == b.dtype == torch.float16
    exact = getattr(OneByOne(), direction)(a.double(), b.double(), g).unflatten(0, (g.clients, -1))
    both = (units[0].double() * units[1].double()).view(-1, *[1] * (exact.ndim - 1))
    result: Tensor = (exact * both).flatten(0, 1).float().contiguous()
    if direction != "weight_gradient":
        return result
    return result.movedim(2, -1).contiguous().movedim(-1, 2)


@pytest.fixture
def always_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "takes_scaled", lambda x, g: True)
    monkeypatch.setattr(convolution, "convolved", by_plain_torch)


@pytest.mark.parametrize("wanted", ["xw", "x", "w"])
def test_gradients_by_differences(wanted: str) -> None:
    """Also where only one is wanted, and where nothing depends on the result."""
    x, w = problem((2, 3, 4, 3, 3, 2, 1), "cpu")
    x.requires_grad_("x" in wanted)
    w.requires_grad_("w" in wanted)
    assert torch.autograd.gradcheck(lambda x, w: convolve(x, w, None, 2, 1), (x, w))


@pytest.mark.usefixtures("always_scaled")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", ["xw", "x", "w"])
def test_scaled_clients_of_all_sizes(wanted: str, compiled: bool) -> None:
    """Each client's result and gradients by itself, against float64."""
    x, w = (t.float() for t in problem(SHAPE, "cpu"))
    sizes = torch.tensor([1e-9, 1e9, 1.0]).repeat_interleave(BATCH)[:, None, None, None]
    x *= sizes
    w *= torch.tensor([1.0, 1e-5, 1e5])[:, None, None, None, None]
    ours, theirs = {"x": x, "w": w}, {"x": x.double(), "w": w.double()}
    inputs = [[each[name].requires_grad_() for name in wanted] for each in (ours, theirs)]
    expected = each_alone(theirs["x"], theirs["w"], 2, 1)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * sizes.flip(0)
    layer = torch.compile(convolve, backend="aot_eager") if compiled else convolve
    y = layer(ours["x"], ours["w"], None, 2, 1)
    mine = (y, *torch.autograd.grad(y, inputs[0], dy))
    true = (expected.detach(), *torch.autograd.grad(expected, inputs[1], dy.double()))
    for one, other in zip(mine, true, strict=True):
        for own, own_true in zip(one.chunk(CLIENTS), other.chunk(CLIENTS), strict=True):
            assert gap(own, own_true) < CLOSE


@pytest.mark.usefixtures("always_scaled")
def test_fakes_of_scaled_operators() -> None:
    """Shapes, types and strides are what compilers were told."""
    x, w = (t.float() for t in problem(SHAPE, "cpu"))
    opcheck(convolution._convolution, (x, w, 2, 1), test_utils="test_faketensor")
    y, *kept = convolution._convolution(x, w, 2, 1)
    for back in (False, True):
        arguments = (torch.randn_like(y), *kept, w, 2, 1, back)
        opcheck(convolution._gradients, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"clients": 1}, False),
        ({"channels": 3}, False),
        ({"channels": 15, "kernel_height": 5, "kernel_width": 5}, True),
    ],
)
def test_which_sizes_are_scaled(
    changed: dict[str, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution_torch, "has_triton", lambda: True)
    g = replace(Geometry(2, 4, 16, 8, 8, 8, 3, 3), **changed)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(1, device="cuda")
        with arithmetic("tf32"):
            assert takes_scaled(x, g) == expected
            assert not takes_scaled(x.bfloat16(), g)
        with arithmetic("float32"):
            assert not takes_scaled(x, g)
