"""Precision of the arithmetic inside a model; weights, sums and norms stay float32 or wider."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.backends import mps

from fedexp.errors import NotDeterministicError, UsageError, require

Precision = Literal["float32", "tf32", "bf16"]
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
NO_FLOAT64 = {"mps"}  # types of devices without float64


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device to train on; refuse one that does not exist here.

    "mps" (Apple silicon) runs in the loop. It has not been tested on such a machine, only on a CPU
    that is not allowed float64 (`NO_FLOAT64`).
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"unknown device {device!r}; use cpu, cuda or mps") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": mps.is_available()}
    require(chosen.type in available, f"cannot train on {chosen.type}; use cpu, cuda or mps")
    require(
        available[chosen.type],
        f"there is no {chosen.type.upper()} device here; leave device out to use the CPU",
    )
    return chosen


def widest(device: torch.device) -> torch.dtype:
    """Return the type of norms and sums: float64, where the device has it."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


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


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic operations only; restore the settings before.

    On the CPU all of them are. cuBLAS reads its variable when it is first used, so a process that
    has used the GPU before should have set CUBLAS_WORKSPACE_CONFIG=:4096:8 itself.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    modes = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    workspace = os.environ.get(CUBLAS)
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).strip().split(". ")[0]
        raise NotDeterministicError(reason) from None
    finally:
        torch.use_deterministic_algorithms(modes[0])
        cudnn.deterministic, cudnn.benchmark = modes[1:]
        if workspace is None:
            os.environ.pop(CUBLAS, None)
