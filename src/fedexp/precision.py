"""Precision of the arithmetic inside a model; weights, sums and norms stay float32 or wider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fedexp.errors import UsageError, require

Precision = Literal["float32", "tf32", "bf16"]


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device to train on; refuse one that does not exist here."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}; use cpu or cuda") from None
    require(found.type in ("cpu", "cuda"), f"cannot train on {found.type}; use cpu or cuda")
    require(
        found.type != "cuda" or torch.cuda.is_available(),
        "there is no CUDA device here; leave device out to use the CPU",
    )
    return found


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
