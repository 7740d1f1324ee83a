"""`records.jsonl`: one JSON object a round, added line by line."""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError
from fedexp.runs.foreign import parse_json, row_fault

RECORDS = "records.jsonl"
Row = dict[str, Any]


class DamagedError(UsageError):
    """What is stored is not as it was written; `what` says where, without the remedy."""

    @property
    def what(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.what}; mend that, or begin again with --restart"


def read_rows(folder: Path, size: int | None = None) -> list[Row]:
    """The rows among the first `size` bytes, or all.

    A last line that was cut off while it was written is left out; any other damage is refused,
    since what lies behind it cannot be trusted.
    """
    path = folder / RECORDS
    data = path.read_bytes() if path.exists() else b""
    if size is not None and len(data) < size:
        raise DamagedError(f"{path} is shorter than its checkpoint says")
    lines = data[:size].split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        rows.append(_parsed(line, number, path))
    return rows


def _parsed(line: bytes, number: int, path: Path) -> Row:
    try:
        row: Row = parse_json(line)
    except ValueError:
        raise DamagedError(f"{path} is damaged at line {number}") from None
    if (fault := row_fault(row, number)) is not None:
        raise DamagedError(f"{path} is damaged at line {number}: {fault}")
    return row


class RecordFile:
    """The open end of the records; everything after `size` bytes is cut off first.

    Nothing waits in memory: what a full disk refused must not be tried again when it is closed.
    """

    def __init__(self, folder: Path, size: int) -> None:
        path = folder / RECORDS
        self._file: FileIO = path.open("ab", buffering=0)
        if path.stat().st_size > size:
            self._file.truncate(size)
        self.size = size

    def append(self, row: Row) -> None:
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        self.size += len(line)

    def sync(self) -> None:
        """Force the rows to the disk: a checkpoint is about to rely on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
