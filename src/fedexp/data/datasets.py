"""Published data sets by name: `load("cifar10")`, or one function each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedexp.data.federation import Batch
from fedexp.data.sources import cifar, cinic
from fedexp.data.sources import emnist as femnist
from fedexp.data.sources.cache import Arrays, Mapped, cached, without_sources
from fedexp.data.sources.download import Source, cache_path, data_folder, unpack
from fedexp.data.sources.splits import RawSplits, check_arrays
from fedexp.errors import UsageError, unknown_name

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Dataset:
    """A data set that can be loaded.

    Attributes:
        source: its official archive.
        locate: returns the files to read in a data folder; none if they are absent.
        build: reads the arrays from these files.
        natural: whether the data set has natural clients.
    """

    source: Source
    locate: Callable[[Path], list[Path]]
    build: Callable[[list[Path]], Arrays]
    natural: bool = False

    @property
    def name(self) -> str:
        return self.source.name

    def load(self, folder: Folder = None) -> RawSplits:
        """Load the data set: from its cache file if that is up to date, else from its files.

        The first load unpacks an archive in the data folder, converts the files and writes the
        cache file. The cache file alone is enough: the original files may be deleted.
        """
        root = data_folder(folder)
        cache = cache_path(root, self.name)
        files = self.locate(root)
        if not files and (root / self.source.archive).exists():
            unpack(self.source, root)
            files = self.locate(root)
        if files:
            arrays = cached(cache, files, lambda: self.build(files), self._check)
        elif cache.exists():
            arrays = self._from_cache(cache)
        else:
            raise self.source.missing(root)
        return RawSplits.of(self.name, self.source.classes, arrays)

    def _check(self, arrays: Mapped) -> None:
        check_arrays(arrays, ("train", "test"), self.natural)

    def _from_cache(self, path: Path) -> Mapped:
        try:
            return without_sources(path, self._check)
        except UsageError as error:
            again = f"delete it and run 'fedexp data fetch {self.name}'"
            raise UsageError(f"{error}; {again}") from error


DATASETS = {
    "emnist": Dataset(femnist.EMNIST, femnist.locate, femnist.build, natural=True),
    "cifar10": Dataset(cifar.CIFAR10, cifar.locate10, cifar.build10),
    "cifar100": Dataset(cifar.CIFAR100, cifar.locate100, cifar.build100),
    "cinic10": Dataset(cinic.CINIC10, cinic.locate, cinic.build),
}


def find(name: str) -> Dataset:
    """Return the data set of that name."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]


def load(name: str, folder: Folder = None) -> RawSplits:
    """Load a data set by name; `folder` is the data folder, by default `FEDEXP_DATA`."""
    return find(name).load(folder)


def emnist(folder: Folder = None) -> RawSplits:
    """Load federated EMNIST; `emnist().federation()` has one client per writer."""
    return load("emnist", folder)


def cifar10(folder: Folder = None) -> RawSplits:
    """Load CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels."""
    return load("cifar10", folder)


def cifar100(folder: Folder = None) -> RawSplits:
    """Load CIFAR-100 with fine labels: 50,000 training and 10,000 test images of 32x32 pixels."""
    return load("cifar100", folder)


def cinic10(folder: Folder = None) -> RawSplits:
    """Load the official training and test splits of CINIC-10, 90,000 images each."""
    return load("cinic10", folder)


def cinic10_valid(folder: Folder = None) -> Batch:
    """Load the official validation split of CINIC-10, which `cinic10` leaves out."""
    root = data_folder(folder)
    folders = cinic.locate(root, ("valid",))
    if not folders:
        raise cinic.CINIC10.missing(root)
    cache = cache_path(root, "cinic10-valid")
    arrays = cached(
        cache,
        folders,
        lambda: cinic.build_split(folders, "valid"),
        lambda found: check_arrays(found, ("valid",)),
    )
    return {field: torch.from_numpy(arrays[f"valid_{field}"]) for field in ("x", "y")}
