"""JSON files in the user's cache folder: timed kernel choices.

A cache only saves time. A file that is missing, damaged or unreadable reads as empty, and a folder
that cannot be written to is left alone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any


def cache_file(*names: str) -> Path | None:
    """Return the path of a cache file; None for a user without a home folder."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(root).joinpath("fedexp", *names)


def read_json(file: Path | None) -> dict[str, Any]:
    """Return the object in a cache file; empty where there is none that can be read."""
    try:
        stored = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write a cache file atomically, so that readers and other writers see whole files only."""
    if file is None:
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}.{get_ident()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(content, indent=1))
            partial.replace(file)
        except OSError:  # a full disk, for one
            partial.unlink(missing_ok=True)
