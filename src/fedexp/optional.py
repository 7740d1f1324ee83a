"""Optional dependencies: imported on use; a missing one raises an error with the pip command."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedexp.errors import UsageError

if TYPE_CHECKING:
    import pandas


def extra(module: str, purpose: str, package: str | None = None, group: str = "data") -> Any:
    """Import a library of the optional dependencies.

    Args:
        module: the module to import.
        purpose: the purpose it is needed for, the subject of the error message.
        package: the name of the package, where it differs from the module's.
        group: the extra of this package that installs it.

    >>> extra("no_such_library", "reading minds")
    Traceback (most recent call last):
    fedexp.errors.UsageError: reading minds needs no_such_library: pip install 'fedexp[data]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise UsageError(f"{purpose} needs {name}: pip install 'fedexp[{group}]'") from error


def data_frame(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame | list[dict[str, Any]]:
    """Return rows as a pandas DataFrame; as a list of dicts without pandas."""
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(rows)
