"""Assertions about errors that a user reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedexp.errors import UsageError


def assert_refused(action: Callable[[], object], *parts: str) -> None:
    """Check that an action raises a `UsageError` of one line that contains all parts."""
    with pytest.raises(UsageError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line
