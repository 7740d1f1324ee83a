"""Convolutions of three clients, one at a time in plain torch: a reference for kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.kernels.convolution_torch import Geometry

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
CLIENTS, BATCH = 3, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 1e-2}  # tf32 in float32
SCALED_TOLERANCE = 4e-4  # of random numbers; tf32, which truncates instead of rounding, is at 9e-4
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


def relative_error(ours: Tensor, expected: Tensor) -> float:
    difference = ours.detach().double() - expected
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))


def geometry(shape: tuple[int, ...]) -> Geometry:
    channels, outputs, height, width, window, stride, padding = shape
    sizes = (channels, height, width, outputs, window, window)
    return Geometry(CLIENTS, BATCH, *sizes, stride, padding)


def random_operands(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Return float64 images, and weights channels last inside longer rows, as in a model."""
    channels, outputs, height, width, window, _, _ = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS * BATCH, channels, height, width, generator=generator).double()
    rows = torch.randn(CLIENTS, 16 + outputs * window**2 * channels, generator=generator).double()
    weights = rows[:, 16:].unflatten(1, (outputs, window, window, channels)).movedim(-1, 2)
    return x.to(device), weights.to(device)


def reference_convolution(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Return `F.conv2d` of each client's images with its weights."""
    images = x.split(BATCH)
    return torch.cat(
        [F.conv2d(i, own, stride=stride, padding=padding) for i, own in zip(images, w, strict=True)]
    )
