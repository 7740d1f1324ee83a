"""`fused`: let torch.compile merge the element-wise work of a function, where it can."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

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
