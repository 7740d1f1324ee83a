"""Files: atomic writes, locks, and readers that trust no bytes.

A file is complete or absent: it is written under a temporary name, synced, then renamed. What is
read raises `ValueError` unless it is JSON, TOML or tensors; types and ranges are checked by whoever
relies on them.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedexp.errors import LockError, UsageError

PRIVATE = 0o600  # mode of files for the owner only: environment, checkpoints, client state


@contextmanager
def replacing(path: Path, mode: int = 0o666, locked: bool = True) -> Iterator[IO[bytes]]:
    """Open a new file that replaces the one at `path` at the end of the block, atomically.

    Concurrent readers, and readers after a power failure, see one of the two files whole. An
    exception in the block deletes the new file.

    Args:
        path: the file to replace.
        mode: mode of the new file from its first byte, less the process's umask.
        locked: whether the writer holds the folder's lock, so that one temporary name suffices;
            several writers need different ones.
    """
    unique = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    scratch = temporary(path) if locked else unique
    try:
        scratch.unlink(missing_ok=True)  # a leftover would retain its mode
        with open(scratch, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)  # a full disk needs the space
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the file by these bytes, see `replacing`; the writer holds the folder's lock."""
    with replacing(path, mode) as file:
        file.write(data)


def write_json(path: Path, value: Any, indent: int | None = 2, mode: int = 0o666) -> None:
    """Replace the file by the value as JSON, atomically; on one line where `indent` is None."""
    write_bytes(path, (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode(), mode)


def temporary(path: Path) -> Path:
    """Return the path that a file is written to before it is renamed."""
    return path.with_name(f".{path.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that renames in it are durable, on systems that have such a call."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def user_cache() -> Path:
    """Return the platform's folder for cache files; `RuntimeError` without a home folder."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise `UsageError` in place of `OSError`: the disk may be full or read-only."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror or error}; make room or choose another "
            "folder (what was stored is intact)"
        ) from error


def parse_json(data: bytes) -> Any:
    """Return the value of JSON; raise `ValueError` for anything else, however deeply nested."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of TOML; raise `ValueError` for anything else, however deeply nested."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(value: Any) -> Any:
    """Return a value with null in place of numbers that are not finite, as JSON requires.

    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_bytes(named: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file; tensors that share memory are copied, as the format requires."""
    from safetensors.torch import save

    whole = {name: value.detach().cpu().contiguous().clone() for name, value in named.items()}
    return save(whole, {"format": "pt"})


def from_bytes(data: bytes, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on a device; raise `ValueError` for other bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        named = load(data)
    except (SafetensorError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a file of tensors ({type(error).__name__})") from error
    return {name: value.to(device) for name, value in named.items()}


def lock_file(path: Path, wait: bool = False) -> IO[bytes]:
    """Open a file and lock it for this process, until the file is closed or the process ends.

    The lock is the operating system's (`flock`), so a killed process leaves none behind. Raises
    `BlockingIOError` if the file is locked already, unless `wait`.

    Args:
        path: the file, created if it does not exist; its content is not used.
        wait: block until the lock is free.
    """
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        file.close()
        if isinstance(error, ImportError):
            raise LockError("this system has no file locks") from None
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            raise LockError(f"cannot lock {path.parent}: {error.strerror}") from None
        raise
    return file
