"""Cross-entropy of rows of logits: kernels against torch's own loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.loss import cross_entropy
from tests.helpers.kernels import DEVICES, needs_gpu

KINDS = [torch.float32, torch.bfloat16]


def example(rows: int, classes: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 5 * torch.randn(rows, classes, generator=generator)
    targets = torch.randint(classes, (rows,), generator=generator)
    return logits.to(device, dtype).requires_grad_(), targets.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (1000, 62), (37, 10), (5, 2000), (9, 3000)])
def test_losses_and_gradients(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    logits, targets = example(*shape, device, dtype)
    targets[0] = 1
    losses = cross_entropy(logits, targets, 1, torch.float32)
    weights = torch.linspace(0.1, 1.0, shape[0], device=device)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=1, reduction="none")
    (gradient64,) = torch.autograd.grad((expected * weights.double()).sum(), exact)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    step = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((gradient.double() - gradient64).norm() / (gradient64.norm() + 1e-9)).item() < step
    assert losses[0].item() == 0.0


@needs_gpu
def test_a_target_that_is_not_a_class_gives_nan() -> None:
    logits, targets = example(4, 3, "cuda", torch.float32)
    targets[1], targets[2] = 3, -1
    losses = cross_entropy(logits, targets, -100, torch.float32)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, True, True, False]
    assert gradient.isnan().all(dim=1).tolist() == [False, True, True, False]
