"""Epilogues of layers, kernel and plain twin, against torch's own modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.kernels.convolution import convolve_relu
from fedexp.kernels.epilogue import Epilogue, epilogue, epilogue_of, plain_epilogue
from fedexp.kernels.layers import gradient_buffers, sum_parts
from fedexp.models import cifar_cnn, emnist_cnn
from fedexp.objective.stack import stacked
from tests.helpers.kernels import BATCH, CLIENTS, DEVICES, TOLERANCE, needs_gpu, relative_error

ROWS = (CLIENTS, BATCH, 10)


def images(side: int, channels: int = 5) -> tuple[int, ...]:
    return (CLIENTS * BATCH, channels, side, side)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (ROWS, Epilogue()),
        (ROWS, Epilogue(relu=True)),
        (images(6), Epilogue(relu=True)),
        (images(6), Epilogue(relu=True, pool=2)),
        (images(7, 70), Epilogue(pool=2)),  # the last row and column are in no window
        (images(9, 33), Epilogue(relu=True, pool=3)),
    ],
    ids=str,
)
def test_an_epilogue_and_its_gradients(
    shape: tuple[int, ...], what: Epilogue, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    channels = shape[1] if len(shape) == 4 else shape[2]
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    bias = torch.randn(CLIENTS, channels, generator=generator).to(device, dtype).requires_grad_()
    inputs = [x, bias] if has_bias else [x]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = exact[0]
    if has_bias and len(shape) == 4:
        expected = expected + exact[1].repeat_interleave(BATCH, dim=0)[:, :, None, None]
    elif has_bias:
        expected = expected + exact[1][:, None]
    expected = expected.relu() if what.relu else expected
    expected = F.max_pool2d(expected, what.pool) if what.pool > 1 else expected
    dy = torch.randn(expected.shape, generator=generator).to(device, dtype)
    expected_grads = torch.autograd.grad(expected, exact, dy.double())
    for function in (epilogue, plain_epilogue):
        y = function(x, bias if has_bias else None, what, True)
        assert y.shape == expected.shape
        assert relative_error(y, expected.detach()) < TOLERANCE[dtype]
        grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            # sums of bf16 gradients are rounded, and rounding may move a maximum
            assert relative_error(grad, expected_grad) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(CLIENTS, BATCH, 700), images(20, 40)], ids=str)
def test_dropout_draws_once_for_both_passes(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    what = Epilogue(dropout=0.25)
    torch.manual_seed(0)
    y = epilogue(x, None, what, True)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y)  # of ones: 0 or 1 / 0.75 in both
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    by_client = (y == 0).flatten(1).float().reshape(CLIENTS, -1)
    assert not torch.equal(by_client[0], by_client[1])
    torch.manual_seed(0)
    assert torch.equal(epilogue(x, None, what, True), y)
    assert not torch.equal(epilogue(x, None, what, True), y)
    assert torch.equal(epilogue(x, None, what, training=False), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pool", [1, 2])
def test_nan_is_passed_on(pool: int, device: str) -> None:
    x = torch.ones(images(4), device=device)
    x[0, 0, 1, 1] = torch.nan
    y = epilogue(x, None, Epilogue(relu=True, pool=pool), True)
    assert y[0, 0].isnan().any()
    assert not y[1:].isnan().any()


def test_an_epilogue_ends_at_what_it_cannot_do() -> None:
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *args: None)
    cases: list[tuple[list[nn.Module], Epilogue]] = [
        ([nn.MaxPool2d(2), nn.ReLU()], Epilogue(True, 2, 0.0, 2)),
        ([nn.Dropout(0.5), nn.ReLU()], Epilogue(False, 1, 0.5, 1)),
        ([nn.ReLU(), nn.MaxPool2d(3, stride=2)], Epilogue(True, 1, 0.0, 1)),
        ([nn.ReLU(), nn.MaxPool2d(2, padding=1)], Epilogue(True, 1, 0.0, 1)),
        ([nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)], Epilogue(True, 1, 0.0, 1)),
        ([nn.ReLU(), nn.Dropout2d(0.5)], Epilogue(True, 1, 0.0, 1)),
        ([nn.Dropout(1.0)], Epilogue()),
        ([nn.GELU(), nn.ReLU()], Epilogue()),
        ([hooked], Epilogue()),
    ]
    for modules, expected in cases:
        assert epilogue_of(modules, images=True) == expected
    assert epilogue_of([nn.MaxPool2d(2)], images=False) == Epilogue()


@pytest.mark.parametrize(
    ("build", "shape"), [(emnist_cnn, (3, 1, 28, 28)), (cifar_cnn, (3, 3, 32, 32))]
)
def test_layers_take_over_what_follows_them_in_a_sequential(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module, x, results = build().eval(), torch.randn(shape), []
    weights = {name: p.detach()[None] for name, p in module.named_parameters()}
    for epilogues in (False, True):
        copy = stacked(module, epilogues)
        assert any(isinstance(layer, nn.Identity) for layer in copy.modules()) == epilogues
        results.append(torch.func.functional_call(copy, weights, (x,)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_partial_gradients_are_summed_into_their_buffers(device: str) -> None:
    parts = torch.randn(2, CLIENTS, 37, 21, device=device)
    one, two = torch.randn(2, CLIENTS, 21, device=device)
    buffer = torch.full((CLIENTS, 21), torch.nan, dtype=torch.bfloat16, device=device)
    with gradient_buffers([one], [buffer]) as written:
        first, second = sum_parts(parts, one, two)
        assert written == {one.data_ptr()}
    assert first is None
    assert second is not None
    torch.testing.assert_close(buffer.float(), parts[0].sum(dim=1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(second, parts[1].sum(dim=1))


@needs_gpu
@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_first_layer_with_relu_in_one_pass(channels: int, offered: bool) -> None:
    shape = (CLIENTS, 32, 3, 3, channels)  # weights are stored with their channels last
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(CLIENTS * BATCH, channels, 12, 12, generator=generator).cuda().bfloat16()
    w = torch.randn(shape, generator=generator).cuda().bfloat16().movedim(-1, 2).requires_grad_()
    b = torch.randn(CLIENTS, 32, generator=generator).cuda().bfloat16().requires_grad_()
    y = convolve_relu(x, w, b, 1, 1)
    assert y is not None
    exact = [each.detach().double().requires_grad_() for each in (w, b)]
    groups = zip(x.double().split(BATCH), *exact, strict=True)
    expected = torch.cat([F.conv2d(own, kernel, shift, padding=1) for own, kernel, shift in groups])
    expected = expected.relu()
    dy = torch.randn(y.shape, generator=generator).cuda().bfloat16()
    expected_grads = torch.autograd.grad(expected, exact, dy.double())
    buffers = [torch.full_like(each, torch.nan) for each in (w.detach(), b.detach())]
    with gradient_buffers([w, b] if offered else [], buffers if offered else []):
        grads = torch.autograd.grad(y, (w, b), dy, allow_unused=True)
    found = [buffer if grad is None else grad for grad, buffer in zip(grads, buffers, strict=True)]
    assert relative_error(y, expected.detach()) < TOLERANCE[torch.bfloat16]
    for grad, expected_grad in zip(found, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 2 * TOLERANCE[torch.bfloat16]
