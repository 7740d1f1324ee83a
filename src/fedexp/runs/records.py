"""`records.jsonl`: one JSON object per round, written line by line; checks of what is read.

A digest shows that a file is as it was written, not who wrote it, so types, ranges and file names
are checked here before anything relies on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from io import FileIO
from pathlib import Path
from typing import Any

from fedexp.errors import DamagedError, shown
from fedexp.experiment import Row
from fedexp.storage import parse_json

LARGEST = 2**63  # integers beyond do not fit the types that hold them
PART_NAME = re.compile(r"checkpoint-[A-Za-z0-9-]{1,80}\.safetensors")

NUMBER = (int, float)
COLUMNS = ("server_lr", "local_lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy")


def row_fault(row: Any, number: int) -> str | None:
    """Return what is wrong with the row of round `number`; None if nothing is.

    Rows of runs on Flower hold the clients' metrics as objects and lists too.
    """
    if not isinstance(row, dict) or not _is(row.get("round"), int) or row["round"] != number:
        return "it is not of its round"
    if not is_duration(row.get("seconds", 0.0)):
        return "its seconds are not a duration"
    for name, value in row.items():
        plain = value is None or isinstance(value, bool | float) or _is(value, NUMBER)
        if not plain and (name in COLUMNS or not isinstance(value, dict | list)):
            return f"its {shown(name)} is not a number"
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
    """Return whether a value has a type; a boolean is not a number, and no number is huge."""
    if isinstance(value, bool) and kind is not bool:
        return False
    huge = isinstance(value, int) and abs(value) > LARGEST
    return isinstance(value, kind) and not huge


RECORDS = "records.jsonl"


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
