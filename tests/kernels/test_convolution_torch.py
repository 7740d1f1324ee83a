"""Float32 scaled to half precision: its errors, NaN and infinity, and convolutions of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedexp.kernels.convolution import convolve
from fedexp.kernels.convolution_torch import (
    PerClient,
    plain_scaled_half,
    scaled_half,
    scaled_images,
    scaled_weights,
)
from fedexp.precision import arithmetic
from tests.helpers.kernels import (
    BATCH,
    CLIENTS,
    DEVICES,
    SCALED_TOLERANCE,
    SHAPES,
    geometry,
    needs_gpu,
    random_operands,
    reference_convolution,
    relative_error,
)

SCALES = torch.tensor([1e-20, 1.0, 1e30])  # of three clients


def numbers(device: str = "cpu") -> Tensor:
    drawn = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(0))
    return (drawn * SCALES[:, None]).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_has_ten_bits(device: str) -> None:
    rows = numbers(device)
    half, unit = scaled_half(rows)
    back = half.double() * unit.double()[:, None]
    assert half.dtype == torch.float16
    assert ((back - rows.double()).abs() <= 2.0**-11 * rows.double().abs() * (1 + 1e-6)).all()
    assert torch.frexp(unit).mantissa.eq(0.5).all()  # powers of two, which are exact
    largest = half.float().abs().amax(dim=1)
    assert ((largest >= 2.0**14) & (largest <= 2.0**15)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_far_below_the_largest_are_close_to_it(device: str) -> None:
    exponents = torch.arange(0, 60, device=device)
    rows = 1.7 * 2.0 ** -exponents[None].float()
    half, unit = scaled_half(rows)
    error = (half.double() * unit.double()[:, None] - rows.double()).abs()
    assert (error[:, :29] <= 2.0**-11 * rows[:, :29]).all()
    assert (error[:, 29:] <= 2.0**-39 * rows[0, 0]).all()
    assert half[0, 59] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_affect_their_client_only(device: str) -> None:
    rows = numbers(device)
    alone, units = scaled_half(rows)
    damaged = torch.cat([rows, rows[1:2], rows[1:2], torch.zeros_like(rows[:1])])
    damaged[3, 5], damaged[4, 6] = torch.nan, -torch.inf
    half, unit = scaled_half(damaged)
    assert half[:3].equal(alone)
    assert unit[:3].equal(units)
    assert unit[3:5].eq(1).all()  # not scaled
    assert half[3, 5].isnan()
    assert half[4, 6] == -torch.inf
    assert half[5].eq(0).all()
    assert unit.isfinite().all()
    assert unit.gt(0).all()


@needs_gpu
def test_kernel_and_plain_twin_are_bit_equal() -> None:
    sizes = torch.tensor([*SCALES, 0.0, 3e-39, torch.nan, torch.inf], device="cuda")
    rows = torch.randn(7, 50_016, device="cuda") * sizes[:, None]
    rows[5:, 17:] = 1e-3  # NaN and infinity at the beginning only
    for part in (rows, rows[:, 16:], rows[:, 16:50_009]):
        for kernel, twin in zip(scaled_half(part), plain_scaled_half(part), strict=True):
            torch.testing.assert_close(kernel, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_scaled_numbers_are_closer_than_tf32(shape: tuple[int, ...]) -> None:
    """The arithmetic of the kernels in plain torch: products of half precision, exact sums."""
    *_, stride, padding = shape
    x, w = (t.float() for t in random_operands(shape, "cpu"))
    g = geometry(shape)
    (images, unit_x), (weights, unit_w) = scaled_images(x, CLIENTS), scaled_weights(w)
    y = PerClient().forward(images.double(), weights.double(), g).unflatten(0, (CLIENTS, -1))
    y = y * (unit_x * unit_w)[:, None, None, None, None]
    assert (
        relative_error(
            y.flatten(0, 1), reference_convolution(x.double(), w.double(), stride, padding)
        )
        < SCALED_TOLERANCE
    )


@needs_gpu
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] >= 16], ids=str)
def test_clients_of_very_different_magnitudes(shape: tuple[int, ...]) -> None:
    """Each client's result and gradients by itself, against float64; one of them is NaN."""
    *_, stride, padding = shape
    x, w = (t.float() for t in random_operands(shape, "cuda"))
    sizes = torch.tensor([1e-9, 1e9, torch.nan], device="cuda").repeat_interleave(BATCH)
    x = (x * sizes[:, None, None, None]).requires_grad_()
    w.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = reference_convolution(exact[0], exact[1], stride, padding)
    dy = torch.randn(expected.shape, device="cuda") * 1e-6
    expected_grads = torch.autograd.grad(expected, exact, dy.double())
    with arithmetic("tf32"):
        y = convolve(x, w, None, stride, padding)
        grads = torch.autograd.grad(y, (x, w), dy)
    for result, exact_result in zip((y, *grads), (expected.detach(), *expected_grads), strict=True):
        assert result.dtype == torch.float32
        for k, (own, own_exact) in enumerate(
            zip(result.chunk(3), exact_result.chunk(3), strict=True)
        ):
            if (
                k == 2 and result is not grads[0]
            ):  # the gradient of the images does not depend on them
                assert own.isnan().any()
            else:
                assert relative_error(own, own_exact) < SCALED_TOLERANCE
