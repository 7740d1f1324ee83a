"""GroupNorm of many clients, kernel and plain twin, against torch's own layer in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedexp.kernels.normalisation import group_norm, plain_group_norm
from tests.helpers.kernels import BATCH, CLIENTS, DEVICES, TOLERANCE, relative_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("channels", "side", "groups"), [(8, 6, 2), (12, 5, 3), (64, 32, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_group_norm_and_gradients(
    dtype: torch.dtype,
    channels: int,
    side: int,
    groups: int,
    has_residual: bool,
    relu: bool,
    device: str,
) -> None:
    generator = torch.Generator().manual_seed(3)
    images = (CLIENTS * BATCH, channels, side, side)
    drawn = [torch.randn(images, generator=generator) * 2 + 1, torch.randn(images)]
    drawn += [torch.randn(CLIENTS, channels, generator=generator) for _ in range(2)]
    x, residual, w, b = (t.to(device, dtype).requires_grad_() for t in drawn)
    inputs = [x, w, b, *([residual] if has_residual else [])]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    parts = [
        F.group_norm(i, groups, own, shift)
        for i, own, shift in zip(exact[0].split(BATCH), exact[1], exact[2], strict=True)
    ]
    expected = torch.cat(parts) + (exact[3] if has_residual else 0)
    expected = expected.relu() if relu else expected
    dy = torch.randn(images, generator=generator).to(device, dtype)
    expected_grads = torch.autograd.grad(expected, exact, dy.double())
    for layer in (group_norm, plain_group_norm):
        y = layer(x, w, b, groups, residual=residual if has_residual else None, relu=relu)
        grads = torch.autograd.grad(y, inputs, dy)
        assert y.dtype == dtype
        assert relative_error(y, expected.detach()) < TOLERANCE[dtype]
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert (
                relative_error(grad, expected_grad) < 2 * TOLERANCE[dtype]
            )  # rounding to bf16 flips the mask of a few values near 0
