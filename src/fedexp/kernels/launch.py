"""`fused`: let torch.compile merge the element-wise work of a function, where it can.

Launching Triton kernels, or only compiling them, many at a time.

A kernel is compiled at its first launch, which takes about a second. A network has dozens of them,
so they are compiled in threads before the first step, by a pass that computes nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedexp.errors import EngineWarning

PROGRAMS = 64


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled; as it is, with a warning, where compilation fails.

    A machine without a C compiler, say, still trains: more slowly, and with the same numbers.
    """
    compiled = torch.compile(function, dynamic=False)
    # every combination of rule, settings and shapes is a program of its own
    many = torch._dynamo.config.patch(recompile_limit=PROGRAMS)
    broken = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                with many:
                    return compiled(*args, **named)
            except torch._dynamo.exc.TorchDynamoException as error:
                broken = True
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"torch.compile failed: {reason}", EngineWarning, stacklevel=2)
        return function(*args, **named)

    return call


# Not a context variable: the backward pass of a GPU runs in a thread of its own.
_compiling: Any = None


@cache
def has_triton() -> bool:
    """Whether the GPU and what is installed can run Triton kernels with tensor cores."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def is_compiling() -> bool:
    """Whether kernels are only compiled now, and results are not written."""
    return _compiling is not None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Run a kernel; inside `compiling_together` only have it compiled."""
    if _compiling is None:
        kernel[grid](*args, **settings)
        return
    from triton.runtime import _async_compile as compilation

    token = compilation.active_mode.set(_compiling)
    try:
        kernel.warmup(*args, grid=grid, **settings)
    finally:
        compilation.active_mode.reset(token)


@contextmanager
def compiling_together() -> Iterator[bool]:
    """Compile what is launched in here, in as many threads as there are cores.

    Says whether this Triton can do so; if not, kernels are compiled one by one at their launch.
    """
    global _compiling
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        yield False
        return
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        mode = AsyncCompileMode(threads, ignore_errors=True)
        _compiling = mode
        try:
            yield True
        finally:
            _compiling = None
            mode.__exit__(None, None, None)


def new_images(shape: tuple[int, int, int, int], like: Tensor, kind: torch.dtype) -> Tensor:
    """Room for images, channels last in memory."""
    return torch.empty(shape, dtype=kind, device=like.device, memory_format=torch.channels_last)
