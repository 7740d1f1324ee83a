"""Download, check and unpack the official archives."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import IO

from fedexp.data.extras import extra
from fedexp.data.files import Source
from fedexp.data.progress import Advance, progress
from fedexp.errors import UsageError, shown

TIMEOUT = (10, 60)  # seconds to connect, and to wait for more
CHUNK = 1 << 20
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def fetch(source: Source, folder: Path, mirror: str | None = None) -> Path:
    """Download an archive and unpack it, unless that is done. Returns the archive's path.

    What is there and good is kept: unpacked files, or else an archive.

    Args:
        source: which archive.
        folder: the data folder.
        mirror: address of a folder that holds the archive under its official name, to be used
            instead of the official address.
    """
    target = folder / source.archive
    if source.files(folder):
        return target
    if not _is_good(source, target):
        _download(source, target, mirror)
        if source.md5 is None:
            _record(target)
    unpack(source, folder)
    return target


def _is_good(source: Source, target: Path) -> bool:
    try:
        check_archive(source, target)
    except UsageError:
        return False
    return target.exists()


def _download(source: Source, target: Path, mirror: str | None) -> None:
    """Let pooch download: into a temporary file, which is checked and then moved in one step."""
    pooch = extra("pooch", "downloading")
    url = f"{mirror.rstrip('/')}/{source.archive}" if mirror else source.url
    known = f"md5:{source.md5}" if source.md5 else None
    pooch.get_logger().setLevel("ERROR")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if known is None:  # else pooch sees by itself that what is there is no good
            target.unlink(missing_ok=True)
        with progress(f"downloading {source.archive}", source.size, "bytes") as advance:

            def into(address: str, path: str, _: object) -> None:
                with Path(path).open("wb") as file:
                    _get(address, file, advance)

            pooch.retrieve(url, known, target.name, target.parent, downloader=into)
    except (OSError, ValueError) as error:  # pooch raises ValueError for a wrong checksum
        wrong = isinstance(error, ValueError) and "hash" in str(error)
        problem = "its checksum is wrong" if wrong else type(error).__name__
        raise UsageError(
            f"could not download {url} ({problem}); download {source.description()} by other means "
            f"and put it in {target.parent}"
        ) from error


def _get(url: str, file: IO[bytes], advance: Advance) -> None:
    """Copy what is at an address. Unlike pooch's own, this closes the connection on an error."""
    requests = extra("requests", "downloading")
    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        for chunk in response.iter_content(CHUNK):
            file.write(chunk)
            advance(len(chunk))


def check_archive(source: Source, path: Path) -> str | None:
    """Check an archive's size and checksum, if it is there. Returns what was checked.

    An archive without a published checksum is checked against the one noted when it was
    downloaded, if it was downloaded by this package.
    """
    if not path.exists():
        return None
    again = f"delete it and run 'fedexp data fetch {source.name}'"
    size, noted = path.stat().st_size, _noted(path)
    if source.size is not None and size != source.size:
        kind = "truncated" if size < source.size else "too long"
        raise UsageError(f"{path}: {kind}, {size:,} bytes instead of {source.size:,}; {again}")
    if source.md5 is not None and (found := digest(path, "md5")) != source.md5:
        raise UsageError(f"{path}: wrong checksum, md5 {found} instead of {source.md5}; {again}")
    if source.md5 is None and noted and (found := digest(path, "sha256")) != noted:
        raise UsageError(f"{path}: wrong checksum, sha256 {found} instead of {noted}; {again}")
    if source.md5 is not None:
        return f"md5 {source.md5}"
    return f"sha256 {noted} as downloaded" if noted else "no checksum is known for it"


def digest(path: Path, algorithm: str) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _noted(path: Path) -> str | None:
    """The checksum that was noted; None where there is no note, or one that holds no checksum."""
    try:
        words = _note(path).read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return None
    return words[0].lower() if words and SHA256.fullmatch(words[0]) else None


def _record(path: Path) -> None:
    """Note the checksum of a download nobody published one for, as `sha256sum` writes it."""
    _note(path).write_text(f"{digest(path, 'sha256')}  {path.name}\n", encoding="ascii")


def unpack(source: Source, folder: Path) -> None:
    """Take the data set's files out of its archive, unless they are there already.

    They are unpacked beside and moved into place when all of them are there.
    """
    archive = folder / source.archive
    if source.files(folder):
        return
    if not hasattr(tarfile, "data_filter"):
        raise UsageError(
            f"cannot unpack {archive} safely before Python 3.11.4; update Python, or unpack it "
            f"into {folder / source.into} by other means"
        )
    check_archive(source, archive)
    try:
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as temporary:
            _extract(archive, Path(temporary))
            _move(source, archive, Path(temporary), folder / source.into)
    except OSError as error:
        raise UsageError(
            f"cannot unpack {archive} ({error.strerror}); make room there, or use another folder"
        ) from error


def _move(source: Source, archive: Path, unpacked: Path, to: Path) -> None:
    for entry in source.entries:
        if not (unpacked / entry).exists():
            raise UsageError(f"{archive}: has no {entry!r}; it is another archive")
    to.mkdir(parents=True, exist_ok=True)
    for entry in source.entries:
        if not (to / entry).exists():
            os.replace(unpacked / entry, to / entry)


def _extract(archive: Path, to: Path) -> None:
    """Extract files and folders below `to`; anything else in the archive is refused."""
    try:
        with (
            tarfile.open(archive) as content,
            progress(f"unpacking {archive.name}", None) as advance,
        ):
            for member in content:
                if not (member.isfile() or member.isdir()):
                    raise UsageError(f"{archive}: {member.name!r} is neither a file nor a folder")
                content.extract(member, to, filter="data")
                advance(1)
            while content.fileobj is not None and content.fileobj.read(CHUNK):
                pass  # to the very end, where the compressed stream has its own checksum
    except tarfile.FilterError as error:
        raise UsageError(f"{archive}: unsafe archive ({shown(error)}); do not use it") from error
    except UsageError:  # which is a ValueError
        raise
    except (*DAMAGE, OSError) as error:
        if getattr(error, "errno", None):  # the disk's fault, not the archive's
            raise
        reason = shown(" ".join(str(error).split()))
        raise UsageError(
            f"{archive}: truncated or damaged archive ({reason}); delete it and fetch it anew"
        ) from error
