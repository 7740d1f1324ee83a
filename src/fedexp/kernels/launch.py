"""Launching Triton kernels, compiling many of them at once, and fusing elementwise work.

A Triton kernel is compiled at its first launch, which takes about a second, and a network has
dozens of them. `compile_in_parallel` compiles them in threads before the first step, by a pass that
computes nothing.
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

from fedexp.errors import EngineWarning, first_line

RECOMPILE_LIMIT = 64  # every combination of rule, settings and shapes is one program


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by `torch.compile`; unchanged, with a warning, if that fails.

    A machine without a C compiler, for example, still trains: more slowly, with the same numbers.
    """
    compiled = torch.compile(function, dynamic=False)
    limit = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)
    broken = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                with limit:
                    return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                broken = True
                warnings.warn(
                    f"torch.compile failed: {first_line(error)}", EngineWarning, stacklevel=2
                )
        return function(*args, **kwargs)

    return call


# Not a context variable: on a GPU the backward pass runs in its own thread.
_compiling: Any = None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed and the GPU has the tensor cores that our kernels use."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def is_compiling() -> bool:
    """Return whether launches only compile at the moment, and write no results."""
    return _compiling is not None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a kernel; inside `compile_in_parallel` only compile it."""
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
def compile_in_parallel() -> Iterator[bool]:
    """Compile the kernels launched inside the block, in as many threads as there are cores.

    Yields whether this Triton can do so; if not, kernels are compiled one by one at their launch.
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


def new_images(shape: tuple[int, int, int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for images, in channels-last memory format."""
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)
