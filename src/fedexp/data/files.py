"""The data folder, and how each data set lies in it: its archive and what comes out of that."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from fedexp.errors import UsageError

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
