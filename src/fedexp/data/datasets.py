"""The data sets by name: `load("cifar10")`, or one function each."""

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
from fedexp.data.sources.download import (
    CIFAR10,
    CIFAR100,
    CINIC10,
    EMNIST,
    Source,
    cache_path,
    data_folder,
    unpack,
)
from fedexp.data.sources.splits import RawSplits, check_arrays
from fedexp.errors import UsageError, unknown_name

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Dataset:
    """A data set that can be loaded.

    Attributes:
        source: its archive and its files.
        locate: the files to be read, of a data folder; none where they are not there.
        build: the arrays, of these files.
        natural: whether the data set says which client an example belongs to.
    """

    source: Source
    locate: Callable[[Path], list[Path]]
    build: Callable[[list[Path]], Arrays]
    natural: bool = False

    @property
    def name(self) -> str:
        return self.source.name

    def load(self, folder: Folder = None) -> RawSplits:
        """Load the data set: from its cache file if that is up to date, else from its own files.

        The first load converts and writes the cache file. An archive that lies in the data folder
        is unpacked. A cache file is enough: the files it was made from may be gone.
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


def _cifar10_files(root: Path) -> list[Path]:
    return [file for entry in CIFAR10.files(root) for file in cifar.files10(entry)]


def _cifar100_files(root: Path) -> list[Path]:
    return [file for entry in CIFAR100.files(root) for file in cifar.files100(entry)]


def _cinic10_folders(root: Path, splits: tuple[str, ...] = ("train", "test")) -> list[Path]:
    found = {path.name: path for path in CINIC10.files(root)}
    return [folder for split in splits if found for folder in cinic.class_folders(found[split])]


def _emnist_files(root: Path) -> list[Path]:
    """The HDF5 files, else LEAF's files in `femnist/`, or in `femnist/data/` as LEAF has them."""
    leaf = (femnist.leaf_files(root / sub) for sub in ("femnist", "femnist/data"))
    return EMNIST.files(root) or next((files for files in leaf if files), [])


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(EMNIST, _emnist_files, femnist.build, natural=True),
        Dataset(CIFAR10, _cifar10_files, cifar.build10),
        Dataset(CIFAR100, _cifar100_files, cifar.build100),
        Dataset(CINIC10, _cinic10_folders, cinic.build),
    )
}


def find(name: str) -> Dataset:
    """The data set of that name."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]


def load(name: str, folder: Folder = None) -> RawSplits:
    """Load a data set by name; `folder` is the data folder, by default `FEDEXP_DATA`."""
    return find(name).load(folder)


def emnist(folder: Folder = None) -> RawSplits:
    """Federated EMNIST; `emnist().federation()` is the federation of its writers."""
    return load("emnist", folder)


def cifar10(folder: Folder = None) -> RawSplits:
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels."""
    return load("cifar10", folder)


def cifar100(folder: Folder = None) -> RawSplits:
    """CIFAR-100 with its fine labels: 50,000 training and 10,000 test images of 32x32 pixels."""
    return load("cifar100", folder)


def cinic10(folder: Folder = None) -> RawSplits:
    """CINIC-10: its official training and test splits, 90,000 images each."""
    return load("cinic10", folder)


def cinic10_valid(folder: Folder = None) -> Batch:
    """The official validation split of CINIC-10, which training and test leave alone."""
    root = data_folder(folder)
    folders = _cinic10_folders(root, ("valid",))
    if not folders:
        raise CINIC10.missing(root)
    cache = cache_path(root, "cinic10-valid")
    arrays = cached(
        cache,
        folders,
        lambda: cinic.build_split(folders, "valid"),
        lambda found: check_arrays(found, ("valid",)),
    )
    return {field: torch.from_numpy(arrays[f"valid_{field}"]) for field in ("x", "y")}
