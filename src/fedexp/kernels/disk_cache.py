"""JSON files in the user's cache folder: timed kernel choices.

A cache only saves time. A file that is missing, damaged or unreadable reads as empty, and a folder
that cannot be written to is left alone.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedexp.storage import parse_json, replacing, user_cache


def cache_file(*names: str) -> Path | None:
    """Return the path of a cache file; None for a user without a home folder."""
    try:
        return user_cache().joinpath("fedexp", *names)
    except RuntimeError:
        return None


def read_json(file: Path | None) -> dict[str, Any]:
    """Return the object in a cache file; empty where there is none that can be read."""
    try:
        stored = parse_json(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write a cache file atomically, so that readers and other writers see whole files only."""
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, locked=False) as scratch:
            scratch.write(json.dumps(content, indent=1).encode())
