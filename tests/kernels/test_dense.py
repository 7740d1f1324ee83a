"""Dense layers, and the flattening before them, against torch's own, one client at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedexp.kernels.dense import flatten_images, products
from fedexp.kernels.layers import gradient_buffers
from tests.helpers.kernels import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offered", [False, True])
def test_products_and_gradients(offered: bool, device: str) -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64, device=device, requires_grad=True)
    rows = torch.randn(3, 40, dtype=torch.float64, device=device)
    w = rows[:, :28].view(3, 4, 7).detach().requires_grad_()
    b = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    buffer = torch.full((3, 48), torch.nan, dtype=torch.float64, device=device)[:, :28].view(
        3, 4, 7
    )
    dy = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    with gradient_buffers([w] if offered else [], [buffer] if offered else []):
        y = products(x, w, b)
        grads = torch.autograd.grad(y, (x, w, b), dy)
    expected = torch.stack([F.linear(x[k], w[k], b[k]) for k in range(3)])
    expected_grads = torch.autograd.grad(expected, (x, w, b), dy)
    torch.testing.assert_close(y, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)
    assert (grads[1].data_ptr() == buffer.data_ptr()) == offered


@pytest.mark.parametrize("device", DEVICES)
def test_images_are_flattened_as_torch_does(device: str) -> None:
    x = torch.randn(4, 70, 9, 8, device=device).to(memory_format=torch.channels_last)
    x.requires_grad_()
    y, expected = flatten_images(x), x.flatten(1)
    dy = torch.randn_like(expected)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, expected)))
