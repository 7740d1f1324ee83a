"""Launching Triton kernels, and compiling many of them at once.

A Triton kernel is compiled at its first launch, which takes about a second, and a network has
dozens of them. `compile_in_parallel` compiles them in threads before the first step, by a pass that
computes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

# Not context variables: on a GPU the backward pass runs in its own thread.
_compiling: Any = None
_disabled = False


def has_triton() -> bool:
    """Return whether kernels may be launched: Triton and a GPU are there, and none is disabled."""
    return not _disabled and _is_supported()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let every operation use its twin in plain PyTorch inside the block."""
    global _disabled
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before


@cache
def _is_supported() -> bool:
    """Return whether Triton is installed and the GPU has the tensor cores that our kernels use."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def load_triton() -> None:
    """Import Triton in a thread, which takes most of a second, while the caller does other work."""
    Thread(target=_load_triton, daemon=True).start()


def _load_triton() -> None:
    with suppress(Exception):  # it may be missing, or of another version
        from triton.runtime.cache import triton_key

        triton_key()  # reads all of Triton once, to name what it compiles


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


def differentiable(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Return the result of an autograd function, which has no type of its own."""
    result: Tensor = function.apply(*args)
    return result
