"""The files of a run: atomic writes, checks of what is read, and `records.jsonl`.

A file is complete or absent: it is written under a temporary name, synced, then renamed. A reader
trusts no bytes: a digest shows that a file is as it was written, not who wrote it, so types, ranges
and file names are checked here before anything relies on them. `records.jsonl` has one JSON object
per round and grows line by line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fedexp.errors import UsageError, shown

PRIVATE = 0o600  # mode of files for the owner only: environment, checkpoints, client state


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the file atomically, for concurrent readers and across a power failure.

    The writer holds the folder's lock, so one temporary name suffices. The file has `mode`, less
    the process's umask, from its first byte.
    """
    scratch = temporary(path)
    try:
        scratch.unlink(missing_ok=True)  # a leftover would retain its mode
        with open(scratch, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)  # a full disk needs the space
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, indent: int | None = 2, mode: int = 0o666) -> None:
    """Replace the file by the value as JSON, atomically; on one line where `indent` is None."""
    write_bytes(path, (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode(), mode)


def temporary(path: Path) -> Path:
    """Return the path that a file is written to before it is renamed."""
    return path.with_name(f".{path.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that renames in it are durable; some file systems need no such call."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


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


LARGEST = 2**63  # integers beyond do not fit the types that hold them
PART_NAME = re.compile(r"checkpoint-[A-Za-z0-9-]{1,80}\.safetensors")

NUMBER = (int, float)
# The fields that `spec_from` reads, and the columns of tables and figures.
SPEC_FIELDS: dict[str, type | tuple[type, ...]] = {
    "task": str,
    "algorithm": str,
    "mode": str,
    "seed": int,
    "rounds": int,
    "evaluate_every": int,
    "engine": str,
    "deterministic": bool,
    "set": dict,
    "options": dict,
}
OPTIONAL_FIELDS: dict[str, type | tuple[type, ...]] = {
    "cohort": (int, float, list, str),
    "clients": int,
    "device": str,
    "precision": str,
    "stop_at": NUMBER,
    "task_source": str,
    "algorithm_source": str,
    "cohort_source": str,
    "by_client": bool,
    "start": str,
    "start_source": str,
    "privacy": dict,
}
COLUMNS = ("server_lr", "local_lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy")


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
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spec_fault(spec: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a resolved spec; None if nothing is."""
    for name, kind in {**SPEC_FIELDS, **OPTIONAL_FIELDS}.items():
        if name not in spec and name in OPTIONAL_FIELDS:
            continue
        if not _is(spec.get(name), kind):
            return f"its {name} is {shown(spec.get(name, 'missing'))}"
        if isinstance(spec[name], str) and not spec[name].isprintable():
            return f"its {name} is not a name"
    if not all(isinstance(value, str) for value in spec["set"].values()):
        return "its set holds something else than text"
    return None


def row_fault(row: Any, number: int) -> str | None:
    """Return what is wrong with the row of round `number`; None if nothing is.

    Rows of runs on Flower hold the clients' metrics as objects and lists too.
    """
    if not isinstance(row, dict) or not _is(row.get("round"), int) or row["round"] != number:
        return "it is not of its round"
    if not is_duration(row.get("seconds", 0.0)):
        return "its seconds are no time"
    for name, value in row.items():
        plain = value is None or isinstance(value, bool) or _is(value, NUMBER)
        if not plain and (name in COLUMNS or not isinstance(value, dict | list)):
            return f"its {shown(name)} is no number"
    return None


def result_fault(result: Any) -> str | None:
    """Return what is wrong with the content of `result.json`; None if nothing is."""
    if not isinstance(result, dict) or not _is(result.get("rounds"), int) or result["rounds"] < 0:
        return "it has no rounds"
    if not is_duration(result.get("seconds")):
        return "it has no seconds"
    at = result.get("diverged_at")
    if not (at is None or _is(at, int)):
        return "it diverged in no round"
    words = (result.get("status"), result.get("reason", ""))
    if not all(isinstance(word, str) and word.isprintable() for word in words):
        return "it has no status"
    return None


def is_count(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Return whether a value is an integer in a range."""
    return _is(value, int) and least <= value <= most


def is_duration(value: Any) -> bool:
    """Return whether a value is a number of seconds."""
    return _is(value, NUMBER) and 0 <= value < math.inf


def is_part_name(value: Any) -> bool:
    """Return whether a value is the name of a checkpoint file, without a path.

    >>> is_part_name("checkpoint-12-clients-0.safetensors"), is_part_name("../checkpoint-1.x")
    (True, False)
    """
    return isinstance(value, str) and PART_NAME.fullmatch(value) is not None


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether a value has a type; a boolean is no number, and no number is huge."""
    if isinstance(value, bool) and kind is not bool:
        return False
    huge = isinstance(value, int) and abs(value) > LARGEST
    return isinstance(value, kind) and not huge


RECORDS = "records.jsonl"
Row = dict[str, Any]


class DamagedError(UsageError):
    """A stored file is not as it was written; `what` names it, without the remedy."""

    @property
    def what(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.what}; fix it, or start over with --restart (restart=True in Python)"


def read_rows(folder: Path, size: int | None = None, sha256: str | None = None) -> list[Row]:
    """Return the rows in the first `size` bytes, or all.

    An incomplete last line is left out; any other damage is refused, since rows after it cannot be
    trusted.

    Args:
        folder: the run folder.
        size: bytes that a checkpoint covers; None for the whole file.
        sha256: their digest; None does not check it.
    """
    path = folder / RECORDS
    data = path.read_bytes() if path.exists() else b""
    if size is not None and len(data) < size:
        raise DamagedError(f"{path} is shorter than its checkpoint records")
    rows: list[Row] = []
    for number, line in enumerate(data[:size].split(b"\n")[:-1], start=1):
        try:
            row = parse_json(line)
        except ValueError:
            raise DamagedError(f"{path} is damaged at line {number}") from None
        if (fault := row_fault(row, number)) is not None:
            raise DamagedError(f"{path} is damaged at line {number}: {fault}")
        rows.append(row)
    if sha256 is not None and hashlib.sha256(data[:size]).hexdigest() != sha256:
        raise DamagedError(f"{path} is not as it was written")
    return rows


class RecordFile:
    """`records.jsonl` open for appending, after truncation to `size` bytes.

    Unbuffered: what a full disk refused must not be written again when the file is closed.

    Attributes:
        path: the file.
        size: bytes written.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / RECORDS
        self._file: FileIO = self.path.open("ab", buffering=0)
        if self.path.stat().st_size > size:
            self._file.truncate(size)
        self.size = size
        self._hash = hashlib.sha256(self.path.read_bytes())

    @property
    def sha256(self) -> str:
        """The digest of all rows."""
        return self._hash.hexdigest()

    def append(self, row: Row) -> None:
        """Write one row."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        self.size += len(line)
        self._hash.update(line)

    def sync(self) -> None:
        """Sync the rows: a checkpoint is about to rely on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def lock_file(path: Path, remedy: str, wait: bool = False) -> IO[bytes]:
    """Open a file and lock it for this process, until the file is closed or the process ends.

    The lock is the operating system's (`flock`), so a killed process leaves none behind. Raises
    `BlockingIOError` if the file is locked already, unless `wait`.

    Args:
        path: the file, created if it does not exist; its content is not used.
        remedy: what the user can do if the file system or the platform has no file locks.
        wait: block until the lock is free.
    """
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        file.close()
        if isinstance(error, ImportError):
            raise UsageError(f"this system has no file locks; {remedy}") from None
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            raise UsageError(f"cannot lock {path.parent}: {error.strerror}; {remedy}") from None
        raise
    return file
