"""Precision of the arithmetic inside a model; weights, sums and norms stay float32 or wider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fedexp.errors import require

Precision = Literal["float32", "tf32", "bf16"]


def default_precision(device: torch.device) -> Precision:
    """Return the fastest precision without loss of accuracy: tf32 on a GPU, else float32.

    Convolutions of many clients use scaled half precision in place of tf32: it has as many bits
    (`kernels.convolution_torch`).
    """
    return "tf32" if device.type == "cuda" else "float32"


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `UsageError` for an unknown precision, and for tf32 on hardware without it."""
    require(
        precision in ("float32", "tf32", "bf16"),
        f"precision is float32, tf32 or bf16, not {precision!r}",
    )
    require(
        precision != "tf32" or device.type == "cuda",
        "tf32 is a mode of NVIDIA GPUs; use precision float32 on this device",
    )


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Allow or forbid tf32 in float32 matrix products inside a block; restores the setting."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
