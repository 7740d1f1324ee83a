"""Files that are whole or not there: written beside, forced to the disk, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError

PRIVATE = 0o600  # for what only the owner of a run may read: environment, checkpoints, states


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put `data` in the place of the file at once, for readers and for a loss of power alike.

    Whoever writes holds the folder's lock, so one name beside is enough. The file gets `mode`, less
    the process's umask, from its first byte on.
    """
    beside = temporary(path)
    try:
        beside.unlink(missing_ok=True)  # one that was left behind would keep its own mode
        with open(beside, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # on a full disk its room is needed
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, indent: int | None = 2, mode: int = 0o666) -> None:
    """The value as JSON, at once; on one line where `indent` is None."""
    write_bytes(path, (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode(), mode)


def temporary(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Make renames in the folder last; some file systems have no such call, and need none."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def telling(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only is told in one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror or error}; make room or choose another "
            "folder (what was stored is intact)"
        ) from error
