"""Secure aggregation by Flower's SecAgg+, which needs Flower's legacy workflow.

A later Flower may drop or change that workflow. So it is an extra with an upper bound,
`fedexp[flower-secure]`, and everything else works with any newer Flower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import flwr

from fedexp.errors import UsageError

VERSIONS = ">=1.41,!=1.42.0,<1.43"  # as in pyproject.toml


@contextmanager
def legacy_workflow() -> Iterator[None]:
    """Import parts of Flower's legacy workflow; name the extra to install where that fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"secure aggregation needs flwr{VERSIONS}, whose legacy workflow it uses, and this is "
            f"flwr {flwr.__version__}: pip install 'fedexp[flower-secure]'"
        ) from error
