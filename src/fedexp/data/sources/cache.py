"""Cache files: named arrays in one memory-mapped file.

A cache file is an ordinary `.npz` file, which `numpy.load` reads too. Its members are uncompressed
and aligned to 64 bytes, so they can be mapped in place: opening a file of any size takes
milliseconds, and processes that open the same file share its pages.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedexp.errors import UsageError, shown
from fedexp.storage import disk_errors, replacing

FORMAT = 2  # raise it when a conversion changes, so that older caches are rebuilt
NOTE = "note.json"
MAX_NOTE = 2**24  # bytes
ALIGNMENT = 64
PADDING_FIELD = 0xD935  # id of the zip extra field for alignment


@dataclass(frozen=True, eq=False)
class Stream:
    """An array that is written in blocks, so that it need not fit in memory.

    Attributes:
        shape: shape of the whole array.
        dtype: dtype of the whole array.
        blocks: consecutive blocks along the first dimension.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    blocks: Iterable[NDArray[Any]]


Arrays = Mapping[str, "NDArray[Any] | Stream"]
Mapped = dict[str, NDArray[Any]]
T = TypeVar("T")


def cached(
    path: Path,
    sources: Sequence[Path],
    build: Callable[[], Arrays],
    convert: Callable[[Mapped], T],
) -> T:
    """Convert the arrays of a cache file; build it first if it is absent, damaged or out of date.

    It is out of date if the name, size or modification time of a source has changed. For a folder
    this means that files were added or removed.

    Args:
        path: the cache file.
        sources: files or folders from which the arrays are built.
        build: builds the arrays.
        convert: converts the memory-mapped arrays; raises `UsageError` for arrays that do not
            belong to this cache.
    """
    stamp = _stamp(sources, path.parent)
    if path.exists():
        with suppress(UsageError):  # then it is rebuilt
            arrays, note = read(path)
            if note == stamp:
                return convert(arrays)
    write(path, build(), stamp)
    return convert(read(path)[0])


def without_sources(path: Path, convert: Callable[[Mapped], T]) -> T:
    """Convert the arrays of a cache file that cannot be rebuilt, because its sources are gone."""
    arrays, note = read(path)
    if note.get("format") != FORMAT:
        raise UsageError(f"{path}: was written by another version of this package")
    try:
        return convert(arrays)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _stamp(sources: Sequence[Path], base: Path) -> dict[str, Any]:
    """Return what identifies the sources of a cache, as JSON."""
    files = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"{source}: missing; unpack the archive of this data set again")
        status = source.stat()
        name = Path(os.path.relpath(source, base)).as_posix()
        files.append([name, status.st_size, status.st_mtime_ns])
    return {"format": FORMAT, "sources": files}


def write(path: Path, arrays: Arrays, note: Mapping[str, Any] | None = None) -> None:
    """Write the arrays atomically: after an error, no partial file is left."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, locked=False) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                _append(archive, file.tell(), name, array)
            archive.writestr(NOTE, json.dumps(dict(note or {})))


def _append(
    archive: zipfile.ZipFile, position: int, name: str, array: NDArray[Any] | Stream
) -> None:
    if not isinstance(array, Stream):
        array = Stream(array.shape, array.dtype, [array])
    dtype = np.dtype(array.dtype)
    info = zipfile.ZipInfo(f"{name}.npy")
    info.extra = _padding(position, info.filename)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(array.shape),
    }
    rows = 0
    with archive.open(info, "w", force_zip64=True) as out:
        np.lib.format.write_array_header_1_0(out, header)
        for block in array.blocks:
            out.write(np.ascontiguousarray(block, dtype=dtype).reshape(-1).view(np.uint8).data)
            rows += len(block)
    if rows != array.shape[0]:
        raise UsageError(f"array {name!r} needs {array.shape[0]} rows, but its blocks have {rows}")


def _padding(position: int, filename: str) -> bytes:
    """Return an extra field that aligns the member's data to `ALIGNMENT`."""
    fixed, zip64, field = 30, 20, 4
    start = position + fixed + len(filename.encode()) + zip64 + field
    fill = -start % ALIGNMENT
    return struct.pack("<HH", PADDING_FIELD, fill) + bytes(fill)


def read(path: Path) -> tuple[Mapped, dict[str, Any]]:
    """Map the arrays of a file written by `write`, and return them with its note.

    The mapping is copy-on-write: the arrays are writable, and the file never changes.
    """
    try:
        with _Bounded(path) as file, zipfile.ZipFile(file) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            stored = archive.getinfo(NOTE)
            if stored.compress_type != zipfile.ZIP_STORED or stored.file_size > MAX_NOTE:
                raise ValueError(f"{NOTE} is not stored as is")
            note = dict(json.loads(archive.read(stored)))
            return {info.filename[:-4]: _map(path, file, info) for info in members}, note
    # Damaged headers make zipfile and numpy raise nearly any exception.
    except Exception as error:
        reason = shown(" ".join(str(error).split())) or type(error).__name__
        raise UsageError(f"{path}: not a data file of this package ({reason})") from error


class _Bounded(io.FileIO):
    """A file whose reads allocate at most its size, whatever length a header claims."""

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


def _map(path: Path, file: io.FileIO, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Map the array of one member, whose data follow its local header."""
    file.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    file.seek(name_length + extra_length, os.SEEK_CUR)
    if np.lib.format.read_magic(file) != (1, 0) or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is not stored as is")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or by_column:  # never interpret bytes of a file as pointers
        raise ValueError(f"{info.filename} does not hold plain numbers")
    if math.prod(shape) * dtype.itemsize > path.stat().st_size:
        raise ValueError(f"{info.filename} has fewer bytes than its header claims")
    if 0 in shape:  # an empty range cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode="c", offset=file.tell(), shape=shape)


def check(path: Path) -> None:
    """Verify the checksums of all members of a file."""
    read(path)
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            raise UsageError(f"{path}: damaged; delete it, and the next load rebuilds it")
