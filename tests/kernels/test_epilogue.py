"""Epilogues of layers, kernel and plain twin, against torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Self, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.kernels.convolution import convolve_relu
from fedexp.kernels.epilogue import Epilogue, epilogue, epilogue_of, plain_epilogue
from fedexp.kernels.layers import gradient_buffers, sum_parts
from fedexp.models import cifar_cnn, emnist_cnn
from fedexp.objective.stack import FusedSequential, stacked
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
        assert any(isinstance(layer, FusedSequential) for layer in copy.modules()) == epilogues
        results.append(torch.func.functional_call(copy, weights, (x,)))
    torch.testing.assert_close(*results)


class Tapped(nn.Module):
    """Uses what a layer of a Sequential returns beside the Sequential, and by parts of it."""

    def __init__(self, sequence: nn.Sequential) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        before = self.sequence[0](x)
        after = before
        for layer in list(self.sequence)[1:]:
            after = layer(after)
        out: Tensor = self.sequence(x) + self.sequence[:2](x).sum() + before.mean() + after
        return out


class Reluctant(nn.ReLU):
    """A ReLU with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - 0.1)


def seen(module: nn.Module) -> nn.Module:
    """Return the module with a hook that changes what it returns."""
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    return module


def shared_modules() -> nn.Module:
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), relu, pool, nn.Conv2d(4, 4, 1), pool, relu, nn.Conv2d(4, 3, 1), relu
    )


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.0, inplace=True)
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    ),
    "shared": shared_modules,
    "tapped": lambda: Tapped(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ReLU())),
    "subclass": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), Reluctant(), nn.MaxPool2d(2)),
    "tuple": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d((2, 3))),
    "wide": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(5), nn.ReLU()),
    "hooked layer": lambda: nn.Sequential(seen(nn.Conv2d(2, 4, 3)), nn.ReLU()),
    "hooked relu": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), seen(nn.ReLU()), nn.ReLU()),
    "no bias": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.MaxPool2d(3), nn.ReLU()),
    "frozen": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3).requires_grad_(False), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.ReLU()
    ),
    "dense": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 6), nn.ReLU(), nn.Linear(6, 5), nn.MaxPool1d(1), nn.ReLU()
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("training", [True, False])
def test_a_fused_sequential_gives_what_its_modules_give(name: str, training: bool) -> None:
    torch.manual_seed(0)
    first = SEQUENCES[name]().double().train(training)
    modules = [first, *(deepcopy(first) for _ in range(CLIENTS - 1))]
    for module in modules[1:]:
        for p in module.parameters():
            p.data += 0.1 * torch.randn_like(p) * p.requires_grad
    x = torch.randn(CLIENTS * BATCH, 2, 8, 8, dtype=torch.float64)
    fused = stacked(first, epilogues=True).train(training)
    names = [n for n, p in first.named_parameters() if p.requires_grad]
    weights = {
        n: torch.stack([m.get_parameter(n).detach() for m in modules]).requires_grad_()
        for n in names
    }
    found = torch.func.functional_call(fused, weights, (x,))
    if name == "tapped":  # the sum over the examples of a client is one over those of all
        assert isinstance(first, Tapped)
        expected = [_tapped(modules, x)]
    else:
        expected = [m(own) for m, own in zip(modules, x.split(BATCH), strict=True)]
    torch.testing.assert_close(found, torch.cat(expected))
    pull = torch.randn_like(found)
    grads = torch.autograd.grad(found, list(weights.values()), pull)
    own = [m.get_parameter(n) for n in names for m in modules]
    exact = torch.autograd.grad(torch.cat(expected), own, pull)
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), _joined(exact))


def _joined(grads: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.flatten() for g in grads])


def _tapped(modules: list[nn.Module], x: Tensor) -> Tensor:
    parts = list(zip([m.sequence for m in modules], x.split(BATCH), strict=True))
    before = torch.cat([cast(nn.Sequential, s)[0](own) for s, own in parts])
    return before.relu() * 2 + before.relu().sum() + before.mean()


class KeptInEvaluation(nn.Sequential):
    """Its dropout is off at all times, by its own mode."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.Dropout):
                layer.eval()
        return self


def test_dropout_is_off_by_its_own_mode() -> None:
    module = KeptInEvaluation(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    weights = {name: p.detach()[None] for name, p in module.named_parameters()}
    x = torch.randn(5, 8)
    fused = stacked(module.train(), epilogues=True).train()
    torch.testing.assert_close(torch.func.functional_call(fused, weights, (x,)), module(x))


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
