"""Digests as `fedexp.runs.spec` asks for them; see `fedexp.identity`."""

from __future__ import annotations

from typing import Any

from fedexp import identity

SOURCE = "source"


def digest_of(value: Any) -> dict[str, str]:
    """Return the digest of a value."""
    return {SOURCE: identity.digest_of(value)}
