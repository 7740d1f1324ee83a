"""Published data sets by name: `load("cifar10")`, or one function each.

A data set is loaded as `RawSplits`: its training and test examples before partitioning, of which
`RawSplits.federation` makes clients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedexp.data.federation import Batch, Federation, check_labels
from fedexp.data.sources import cifar, cinic
from fedexp.data.sources import emnist as femnist
from fedexp.data.sources import mnist as mnist_files
from fedexp.data.sources import shakespeare as plays
from fedexp.data.sources.cache import Arrays, Mapped, cached, without_sources
from fedexp.data.sources.download import Source, cache_path, data_folder, unpack
from fedexp.errors import UsageError, require, unknown_name

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True, eq=False)
class RawSplits:
    """Training and test examples before partitioning: the fields `x` and `y`.

    Of images, `x` is uint8 [examples, channels, height, width] and `y` the int64 labels. Of text,
    both are int64 tokens [sequences, length]; `y` holds the token after each of `x`, and 0 is
    padding.

    Attributes:
        name: name of the data set on the command line.
        classes: number of classes, of text the number of tokens; labels are 0 to classes - 1.
        train: training examples, in the order of the files.
        test: test examples.
        offsets: for a data set with natural clients, client i owns the training rows offsets[i] to
            offsets[i + 1]; else None.
        clients: names of the natural clients, where the data set has them.
        test_offsets: natural client i owns the test rows test_offsets[i] to test_offsets[i + 1];
            None where test examples belong to no client.
    """

    name: str
    classes: int
    train: Batch
    test: Batch
    offsets: NDArray[np.int64] | None = None
    clients: tuple[str, ...] = ()
    test_offsets: NDArray[np.int64] | None = None

    @property
    def is_text(self) -> bool:
        """Whether an example is a sequence of tokens, with one label per token."""
        return self.train["y"].ndim > 1

    @classmethod
    def of(cls, name: str, classes: int, arrays: Mapping[str, NDArray[Any]]) -> RawSplits:
        """Wrap the arrays of a cache file of images, without a copy."""
        check_arrays(arrays, ("train", "test"))
        for split in ("train", "test"):
            check_labels(arrays[f"{split}_y"], classes, f"the {split} images of {name}")
        train, test = (
            {field: torch.from_numpy(arrays[f"{split}_{field}"]) for field in ("x", "y")}
            for split in ("train", "test")
        )
        natural = np.array(arrays["offsets"]) if "offsets" in arrays else None
        return cls(name, classes, train, test, natural)

    @classmethod
    def of_text(cls, name: str, tokens: int, arrays: Mapping[str, NDArray[Any]]) -> RawSplits:
        """Convert the uint8 tokens of a cache file to int64, as embeddings and losses take them."""
        check_text(arrays, tokens)
        train, test = (
            {f: torch.from_numpy(arrays[f"{split}_{f}"].astype(np.int64)) for f in ("x", "y")}
            for split in ("train", "test")
        )
        names = tuple(bytes(each).decode("utf-8", "replace") for each in arrays["clients"])
        own = np.array(arrays["test_offsets"])
        owned = own if len(own) else None
        return cls(name, tokens, train, test, np.array(arrays["offsets"]), names, owned)

    def federation(self, parts: Sequence[NDArray[np.int64]] | None = None) -> Federation:
        """Return the training examples by client: by a partition, or by natural clients.

        Natural clients are memory-mapped from the cache file; a partition is copied once.
        """
        if parts is not None:
            return Federation.from_parts(self.train, parts)
        require(
            self.offsets is not None,
            f"{self.name} has no natural clients; give a partition, e.g. one of "
            "fedexp.data.partition.dirichlet",
        )
        assert self.offsets is not None
        return Federation(self.train, self.offsets)


def check_arrays(
    arrays: Mapping[str, NDArray[Any]], splits: Sequence[str], natural: bool = False
) -> None:
    """Refuse arrays that are not the images and labels of these splits.

    Args:
        arrays: the arrays of a cache file, by name.
        splits: required splits, e.g. train and test.
        natural: whether the offsets of natural clients are required.
    """
    for split in splits:
        x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
        good = x.ndim == 4 and x.dtype == np.uint8 and y.dtype == np.int64
        require(good and y.shape == x.shape[:1], f"it does not hold the {split} images and labels")
    require(not natural or "offsets" in arrays, "it does not hold the offsets of the clients")


def check_text(arrays: Mapping[str, NDArray[Any]], tokens: int) -> None:
    """Refuse arrays that are not sequences of tokens below `tokens`, with named clients."""
    for split in ("train", "test"):
        x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
        good = x.ndim == 2 and x.shape == y.shape and x.dtype == y.dtype == np.uint8
        require(good, f"it does not hold the {split} sequences")
        known = x.size == 0 or max(int(x.max()), int(y.max())) < tokens
        require(known, f"it holds {split} tokens that are not below {tokens}")
    offsets, clients = (arrays.get(name, np.empty(())) for name in ("offsets", "clients"))
    good = offsets.ndim == clients.ndim == 1 and len(offsets) == len(clients) + 1
    require(good and clients.dtype.kind == "S", "it does not hold the names of the clients")
    own, rows = arrays.get("test_offsets", np.empty(())), len(arrays["test_x"])
    good = own.ndim == 1 and own.dtype == np.int64 and len(own) in (0, len(offsets))
    require(good, "it does not hold the test offsets of the clients")
    good = not len(own) or (own[0] == 0 and own[-1] == rows and bool((np.diff(own) > 0).all()))
    require(good, "the test offsets of its clients are not increasing")


@dataclass(frozen=True)
class Dataset:
    """A data set that can be loaded.

    Attributes:
        source: its official archive.
        locate: returns the files to read in a data folder; none if they are absent.
        build: reads the arrays from these files.
        natural: whether the data set has natural clients.
        text: whether it is text, which is split into sequences of tokens.
    """

    source: Source
    locate: Callable[[Path], list[Path]]
    build: Callable[[list[Path]], Arrays]
    natural: bool = False
    text: bool = False

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
        wrap = RawSplits.of_text if self.text else RawSplits.of
        return wrap(self.name, self.source.classes, arrays)

    def _check(self, arrays: Mapped) -> None:
        if self.text:
            check_text(arrays, self.source.classes)
            return
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
    "mnist": Dataset(mnist_files.MNIST, mnist_files.locate, mnist_files.build),
    "shakespeare": Dataset(plays.SHAKESPEARE, plays.locate, plays.build, natural=True, text=True),
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


def mnist(folder: Folder = None) -> RawSplits:
    """Load MNIST: 60,000 training and 10,000 test images of 28x28 pixels."""
    return load("mnist", folder)


def shakespeare(folder: Folder = None) -> RawSplits:
    """Load Shakespeare by role; `shakespeare().federation()` has one client per role."""
    return load("shakespeare", folder)


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
