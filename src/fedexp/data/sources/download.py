"""A progress bar on stderr for the few things that take longer than a breath.

The data folder, and how each data set lies in it: its archive and what comes out of that.

Download, check and unpack the official archives.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedexp.errors import UsageError, shown
from fedexp.optional import extra

Advance = Callable[[int], None]


@contextmanager
def progress(
    what: str, total: int | None, unit: str = "", show: bool | None = None
) -> Iterator[Advance]:
    """Show a bar while the block runs; call what it gives with the amount done since last time.

    Args:
        what: said before the bar.
        total: the amount that is all of it, or None where nobody knows.
        unit: what is counted; "bytes" is shown as kB, MB and so on.
        show: whether to draw at all; by default only where stderr is a terminal.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    visible = sys.stderr.isatty() if show is None else show
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.advance(task, done)


VARIABLE = "FEDEXP_DATA"


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and what its files are called.

    Attributes:
        name: what the data set is called on the command line.
        archive: file name of the official archive.
        size: bytes of the archive, or None where it is not known.
        md5: its checksum, or None where none was ever published.
        url: the official address.
        entries: the files and folders of the archive that are kept.
        into: folder they are put in, below the data folder.
        classes: number of labels.
        examples: official numbers of training and test examples.
    """

    name: str
    archive: str
    size: int | None
    md5: str | None
    url: str
    entries: tuple[str, ...]
    classes: int
    examples: tuple[int, int]
    into: str = ""

    def files(self, folder: Path) -> list[Path]:
        """The kept files and folders, or nothing unless all of them are there."""
        found = [folder / self.into / entry for entry in self.entries]
        return found if all(path.exists() for path in found) else []

    def description(self) -> str:
        """The archive in words, e.g. for a user who has to download it by hand."""
        size = "size not published" if self.size is None else f"{self.size:,} bytes"
        checksum = "checksum not published" if self.md5 is None else f"md5 {self.md5}"
        return f"{self.archive} ({size}, {checksum})"

    def missing(self, folder: Path) -> UsageError:
        """The error for a data set that is not in the folder."""
        return UsageError(
            f"{self.name} is not in {folder}; run 'fedexp data fetch {self.name}', or put "
            f"{self.description()} from {self.url} there, or set {VARIABLE} to the folder it is in"
        )


CIFAR10 = Source(
    name="cifar10",
    archive="cifar-10-python.tar.gz",
    size=170_498_071,
    md5="c58f30108f718f92721af3b95e74349a",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    entries=("cifar-10-batches-py",),
    classes=10,
    examples=(50_000, 10_000),
)
CIFAR100 = Source(
    name="cifar100",
    archive="cifar-100-python.tar.gz",
    size=169_001_437,
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    entries=("cifar-100-python",),
    classes=100,
    examples=(50_000, 10_000),
)
CINIC10 = Source(
    name="cinic10",
    archive="CINIC-10.tar.gz",
    size=687_544_992,
    md5="6ee4d0c996905fe93221de577967a372",
    url="https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    entries=("train", "valid", "test"),
    into="CINIC-10",  # the archive has no folder of its own
    classes=10,
    examples=(90_000, 90_000),
)
EMNIST = Source(
    name="emnist",
    archive="fed_emnist.tar.bz2",
    size=None,
    md5=None,
    url="https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
    entries=("fed_emnist_train.h5", "fed_emnist_test.h5"),
    classes=62,
    examples=(671_585, 77_483),
)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the data: the argument, else `FEDEXP_DATA`, else the user's cache.

    >>> data_folder("somewhere").name
    'somewhere'
    """
    chosen = folder or os.environ.get(VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else _user_cache() / "fedexp"
    except RuntimeError as error:  # of a user who does not exist, or has no home
        named = chosen or "the user's cache"
        raise UsageError(
            f"{named}: cannot tell where this home folder is; set {VARIABLE} to a full path"
        ) from error


def _user_cache() -> Path:
    """The folder that the platform sets aside for files that can be had again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_path(folder: Path, name: str) -> Path:
    """The cache file of a data set. Nothing else is ever written by loading it."""
    return folder / "cache" / f"{name}.npz"


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
