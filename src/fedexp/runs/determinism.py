"""What in the process decides the last bits of a sum: threads, and torch's deterministic mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedexp.errors import UsageError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads; put back what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use only operations that give the same bits every time; put back what was set.

    On the CPU they all do. cuBLAS reads its variable when it is first used, so a process that has
    used the GPU before should have set CUBLAS_WORKSPACE_CONFIG=:4096:8 itself.
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
        raise UsageError(f"{reason}; leave --deterministic out, or train on the CPU") from None
    finally:
        torch.use_deterministic_algorithms(modes[0])
        cudnn.deterministic, cudnn.benchmark = modes[1:]
        if workspace is None:
            os.environ.pop(CUBLAS, None)
