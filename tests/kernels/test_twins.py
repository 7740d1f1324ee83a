"""Stacked layers against one client at a time: on the CPU always, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.convolution import convolve
from fedexp.kernels.convolution_torch import Geometry, OneByOne, Unfolded
from fedexp.kernels.normalisation import group_norm, plain_group_norm
from fedexp.precision import arithmetic

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
DEVICES = ["cpu", GPU]
# channels, outputs, height, width, window, stride, padding
SHAPES = [
    (1, 5, 9, 9, 3, 1, 0),
    (3, 20, 8, 11, 3, 1, 1),
    (3, 8, 12, 12, 5, 1, 0),
    (16, 24, 9, 8, 3, 2, 1),
    (16, 32, 8, 8, 1, 2, 0),
    (32, 64, 10, 10, 3, 1, 1),
    (40, 130, 7, 7, 3, 1, 1),
    (256, 512, 4, 4, 3, 1, 1),
]
CLIENTS, BATCH = 3, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 1e-2}  # tf32 in float32


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(ours.detach().double() - theirs) / torch.linalg.vector_norm(theirs)
    )


def problem(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Images, and weights that lie channels last inside longer rows, as a model's do."""
    channels, outputs, height, width, window, _, _ = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS * BATCH, channels, height, width, generator=generator).double()
    rows = torch.randn(CLIENTS, 16 + outputs * window**2 * channels, generator=generator).double()
    weights = rows[:, 16:].unflatten(1, (outputs, window, window, channels)).movedim(-1, 2)
    return x.to(device), weights.to(device)


def each_alone(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    images = x.split(BATCH)
    return torch.cat(
        [F.conv2d(i, own, stride=stride, padding=padding) for i, own in zip(images, w, strict=True)]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_and_its_gradients(
    shape: tuple[int, ...], kind: torch.dtype, device: str
) -> None:
    """Whatever form is chosen, against float64 one client at a time."""
    *_, stride, padding = shape
    x, w = (t.to(kind).requires_grad_() for t in problem(shape, device))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    expected = each_alone(exact_x, exact_w, stride, padding)
    with arithmetic("tf32" if device == "cuda" else "float32"):
        y = convolve(x, w, None, stride, padding)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        ours = torch.autograd.grad(y, (x, w), dy)
    theirs = torch.autograd.grad(expected, (exact_x, exact_w), dy.double())
    for mine, true in zip((y, *ours), (expected, *theirs), strict=True):
        assert mine.shape == true.shape
        assert gap(mine, true.detach()) < TOLERANCE[kind]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_plain_forms_agree(shape: tuple[int, ...]) -> None:
    channels, outputs, height, width, window, stride, padding = shape
    x, w = problem(shape, "cpu")
    g = Geometry(CLIENTS, BATCH, channels, height, width, outputs, window, window, stride, padding)
    y = OneByOne().forward(x, w, g)
    dy = torch.randn(y.shape, dtype=y.dtype)
    for name, a, b in (
        ("forward", x, w),
        ("input_gradient", dy, w),
        ("weight_gradient", dy, x),
    ):
        one, other = (getattr(form, name)(a, b, g) for form in (OneByOne(), Unfolded()))
        assert gap(one, other) < TOLERANCE[torch.float64]


def test_bias_is_added_client_by_client() -> None:
    x, w = problem(SHAPES[0], "cpu")
    bias = torch.randn(CLIENTS, 5, dtype=torch.float64)
    added = convolve(x, w, bias) - convolve(x, w)
    expected = bias.repeat_interleave(BATCH, 0)[:, :, None, None].expand_as(added)
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("channels", "side", "groups"), [(8, 6, 2), (12, 5, 3), (64, 32, 2)])
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_group_norm_and_its_gradients(
    kind: torch.dtype, channels: int, side: int, groups: int, joined: bool, relu: bool, device: str
) -> None:
    """The kernel and its twin against torch's own layer, one client at a time, in float64."""
    generator = torch.Generator().manual_seed(3)
    images = (CLIENTS * BATCH, channels, side, side)
    drawn = [torch.randn(images, generator=generator) * 2 + 1, torch.randn(images)]
    drawn += [torch.randn(CLIENTS, channels, generator=generator) for _ in range(2)]
    x, residual, w, b = (t.to(device, kind).requires_grad_() for t in drawn)
    wanted = [x, w, b, *([residual] if joined else [])]
    exact = [t.detach().double().requires_grad_() for t in wanted]
    parts = [
        F.group_norm(i, groups, own, shift)
        for i, own, shift in zip(exact[0].split(BATCH), exact[1], exact[2], strict=True)
    ]
    expected = torch.cat(parts) + (exact[3] if joined else 0)
    expected = expected.relu() if relu else expected
    dy = torch.randn(images, generator=generator).to(device, kind)
    theirs = torch.autograd.grad(expected, exact, dy.double())
    for layer in (group_norm, plain_group_norm):
        y = layer(x, w, b, groups, residual=residual if joined else None, relu=relu)
        ours = torch.autograd.grad(y, wanted, dy)
        assert y.dtype == kind
        assert gap(y, expected.detach()) < TOLERANCE[kind]
        for mine, true in zip(ours, theirs, strict=True):
            assert (
                gap(mine, true) < 2 * TOLERANCE[kind]
            )  # bf16 turns a few values at the ReLU's edge
