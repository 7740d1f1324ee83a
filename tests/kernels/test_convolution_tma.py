"""TMA convolutions: every likely box against float64, on a Hopper GPU only."""

from __future__ import annotations

import pytest
import torch

from fedexp.kernels.convolution import Direction, implementation_named
from fedexp.kernels.convolution_torch import Geometry, scaled_images, scaled_weights
from tests.helpers.kernels import (
    BATCH,
    CLIENTS,
    TOLERANCE,
    reference_convolution,
    relative_error,
)

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
needs_hopper = pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")
# channels, outputs, side; the batch of 4 does not fill boxes of 8 images
SIZES = [(64, 64, 32), (64, 128, 16), (128, 256, 16), (256, 256, 8), (512, 256, 4)]


@needs_hopper
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_likely_box(size: tuple[int, int, int], scaled: bool) -> None:
    from fedexp.kernels.convolution_tma import likely_boxes

    dtype = torch.float32 if scaled else torch.bfloat16
    channels, outputs, side = size
    g = Geometry(CLIENTS, BATCH, channels, side, side, outputs, 3, 3, 1, 1)
    x = torch.randn(CLIENTS * BATCH, channels, side, side, device="cuda").to(dtype)
    x = x.to(memory_format=torch.channels_last)
    w = torch.randn(CLIENTS, outputs, 3, 3, channels, device="cuda").to(dtype).movedim(-1, 2)
    exact = x.double().requires_grad_(), w.double().requires_grad_()
    y = reference_convolution(exact[0], exact[1], 1, 1)
    dy = torch.randn_like(y).to(dtype).to(memory_format=torch.channels_last)
    dx, dw = torch.autograd.grad(y, exact, dy.double())
    cases: dict[Direction, tuple[torch.Tensor, ...]] = {
        "forward": (x, w, y.detach()),
        "input_gradient": (dy, w, dx),
        "weight_gradient": (dy, x, dw),
    }
    for direction, (a, b, expected) in cases.items():
        scales = {}
        if scaled:
            b_scaled = scaled_images(b, CLIENTS) if b.ndim == 4 else scaled_weights(b)
            (a, unit_a), (b, unit_b) = scaled_images(a, CLIENTS), b_scaled
            scales = {"units": (unit_a, unit_b)}
        names = likely_boxes(direction, g, 2)
        assert len(names) == 2
        for name in names:
            result = implementation_named(name, direction)(a, b, g, **scales)
            assert result.dtype == dtype
            assert relative_error(result, expected) < TOLERANCE[dtype], name


@needs_hopper
def test_nan_of_one_client_does_not_reach_another() -> None:
    """Boxes reach beyond a client's images; the values there must not count."""
    from fedexp.kernels.convolution_tma import likely_boxes

    g = Geometry(CLIENTS, BATCH - 1, 256, 4, 4, 256, 3, 3, 1, 1)
    images = (CLIENTS * (BATCH - 1), 256, 4, 4)
    x, dy = (torch.randn(images, device="cuda").bfloat16() for _ in range(2))
    x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    w = torch.randn(CLIENTS, 256, 3, 3, 256, device="cuda").bfloat16().movedim(-1, 2)
    for t in (x, dy):
        t[BATCH - 1 : 2 * (BATCH - 1)] = torch.nan
    operands: dict[Direction, tuple[torch.Tensor, ...]] = {
        "forward": (x, w),
        "input_gradient": (dy, w),
        "weight_gradient": (dy, x),
    }
    for direction, (a, b) in operands.items():
        for name in likely_boxes(direction, g, 2):
            result = implementation_named(name, direction)(a, b, g)
            each = result.reshape(CLIENTS, -1)
            assert each[[0, 2]].isfinite().all(), name
            assert each[1].isnan().all(), name
