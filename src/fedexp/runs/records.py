"""`records.jsonl`: one JSON object a round, added line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from fedexp.errors import UsageError, require

RECORDS = "records.jsonl"
Row = dict[str, Any]


def read_rows(folder: Path, size: int | None = None) -> list[Row]:
    """The rows among the first `size` bytes, or all.

    A last line that was cut off while it was written is left out; any other damage is refused,
    since what lies behind it cannot be trusted.
    """
    path = folder / RECORDS
    data = path.read_bytes() if path.exists() else b""
    require(
        size is None or len(data) >= size,
        f"{path} is shorter than its checkpoint says; put the missing lines back, or use --restart",
    )
    lines = data[:size].split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        rows.append(_parsed(line, number, path))
    return rows


def _parsed(line: bytes, number: int, path: Path) -> Row:
    try:
        row = json.loads(line)
        if row["round"] != number:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{path} is damaged at line {number}; mend that line, or use --restart"
        ) from None
    return row


class RecordFile:
    """The open end of the records; everything after `size` bytes is cut off first."""

    def __init__(self, folder: Path, size: int) -> None:
        path = folder / RECORDS
        self._file: IO[bytes] = path.open("ab")
        if path.stat().st_size > size:
            self._file.truncate(size)
        self.size = size

    def append(self, row: Row) -> None:
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self.size += len(line)

    def sync(self) -> None:
        """Force the rows to the disk: a checkpoint is about to rely on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
