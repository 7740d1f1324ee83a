"""Libraries that only some need: imported when they are, and asked for in one line."""

from __future__ import annotations

import importlib
from typing import Any

from fedexp.errors import UsageError


def extra(module: str, purpose: str, package: str | None = None, group: str = "data") -> Any:
    """Import a library of the optional dependencies.

    Args:
        module: what to import.
        purpose: what it is needed for.
        package: what it is called where it differs from what is imported.
        group: the group of optional dependencies that brings it.

    >>> extra("no_such_library", "reading minds")
    Traceback (most recent call last):
    fedexp.errors.UsageError: reading minds needs no_such_library: pip install 'fedexp[data]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise UsageError(f"{purpose} needs {name}: pip install 'fedexp[{group}]'") from error
