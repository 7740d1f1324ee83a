"""Published data sets by name: `load("cifar10")`.

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
from fedexp.data.sources import cifar, cinic, emnist, mnist, shakespeare
from fedexp.data.sources.cache import Arrays, Mapped, cached, without_sources
from fedexp.data.sources.download import Source, cache_path, data_folder, unpack
from fedexp.errors import UsageError, check_name, require

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
        offsets: for a data set with natural clients (writers of EMNIST, roles of Shakespeare),
            client i owns the training rows offsets[i] to offsets[i + 1]; else None.
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
    def of(
        cls, name: str, classes: int, arrays: Mapping[str, NDArray[Any]], natural: bool = False
    ) -> RawSplits:
        """Wrap the arrays of a cache file of images, without a copy; refuse any other arrays.

        Args:
            name: name of the data set.
            classes: number of classes.
            arrays: the arrays by name.
            natural: whether the offsets of natural clients are required.
        """
        splits: dict[str, Batch] = {}
        for split in ("train", "test"):
            x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
            valid = x.ndim == 4 and x.dtype == np.uint8 and y.dtype == np.int64
            valid = valid and y.shape == x.shape[:1]
            require(valid, f"it does not hold the {split} images and labels")
            check_labels(y, classes, f"the {split} images of {name}")
            splits[split] = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
        require(not natural or "offsets" in arrays, "it does not hold the offsets of the clients")
        offsets = np.array(arrays["offsets"]) if "offsets" in arrays else None
        return cls(name, classes, splits["train"], splits["test"], offsets)

    @classmethod
    def of_text(cls, name: str, tokens: int, arrays: Mapping[str, NDArray[Any]]) -> RawSplits:
        """Convert the uint8 tokens of a cache file to int64, as embeddings and losses take them."""
        check_text(arrays, tokens)
        train, test = (
            {f: torch.from_numpy(arrays[f"{split}_{f}"].astype(np.int64)) for f in ("x", "y")}
            for split in ("train", "test")
        )
        clients = tuple(bytes(client).decode("utf-8", "replace") for client in arrays["clients"])
        ends = np.array(arrays["test_offsets"])
        test_offsets = ends if len(ends) else None
        offsets = np.array(arrays["offsets"])
        return cls(name, tokens, train, test, offsets, clients, test_offsets)

    def federation(self, parts: Sequence[NDArray[np.int64]] | None = None) -> Federation:
        """Return the training examples by client: by a partition, or by natural clients.

        Natural clients are memory-mapped from the cache file; a partition is copied once.
        """
        if parts is not None:
            return Federation.from_parts(self.train, parts)
        if self.offsets is None:
            raise UsageError(
                f"{self.name} has no natural clients; give a partition, e.g. one of "
                "fedexp.data.partition.dirichlet"
            )
        return Federation(self.train, self.offsets)


def check_text(arrays: Mapping[str, NDArray[Any]], tokens: int) -> None:
    """Refuse arrays that are not sequences of tokens below `tokens`, with named clients."""
    for split in ("train", "test"):
        x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
        valid = x.ndim == 2 and x.shape == y.shape and x.dtype == y.dtype == np.uint8
        require(valid, f"it does not hold the {split} sequences")
        in_range = x.size == 0 or max(int(x.max()), int(y.max())) < tokens
        require(in_range, f"it holds {split} tokens that are not below {tokens}")
    offsets, clients = (arrays.get(name, np.empty(())) for name in ("offsets", "clients"))
    valid = offsets.ndim == clients.ndim == 1 and len(offsets) == len(clients) + 1
    require(valid and clients.dtype.kind == "S", "it does not hold the names of the clients")
    ends, rows = arrays.get("test_offsets", np.empty(())), len(arrays["test_x"])
    valid = ends.ndim == 1 and ends.dtype == np.int64 and len(ends) in (0, len(offsets))
    require(valid, "it does not hold the test offsets of the clients")
    valid = not len(ends) or (ends[0] == 0 and ends[-1] == rows and bool((np.diff(ends) > 0).all()))
    require(valid, "the test offsets of its clients are not increasing")


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

    def present(self, root: Path) -> list[str]:
        """Return which of archive, files and cache are in a data folder."""
        converted = cache_path(root, self.name)
        here = ["archive"] if (root / self.source.archive).exists() else []
        here += ["files"] if self.locate(root) else []
        if converted.exists():
            here.append(f"cache ({converted.stat().st_size / 1e6:,.0f} MB)")
        return here

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
            return cached(cache, files, lambda: self.build(files), self._splits)
        if not cache.exists():
            raise self.source.missing(root)
        try:
            return without_sources(cache, self._splits)
        except UsageError as error:
            again = f"delete it and run 'fedexp data fetch {self.name}'"
            raise UsageError(f"{error}; {again}") from error

    def _splits(self, arrays: Mapped) -> RawSplits:
        if self.text:
            return RawSplits.of_text(self.name, self.source.classes, arrays)
        return RawSplits.of(self.name, self.source.classes, arrays, self.natural)


DATASETS = {
    "emnist": Dataset(emnist.EMNIST, emnist.locate, emnist.build, natural=True),
    "cifar10": Dataset(cifar.CIFAR10, cifar.locate10, cifar.build10),
    "cifar100": Dataset(cifar.CIFAR100, cifar.locate100, cifar.build100),
    "cinic10": Dataset(cinic.CINIC10, cinic.locate, cinic.build),
    "mnist": Dataset(mnist.MNIST, mnist.locate, mnist.build),
    "shakespeare": Dataset(
        shakespeare.SHAKESPEARE, shakespeare.locate, shakespeare.build, natural=True, text=True
    ),
}


def find(name: str) -> Dataset:
    """Return the data set of that name."""
    check_name("data set", name, DATASETS)
    return DATASETS[name]


def load(name: str, folder: Folder = None) -> RawSplits:
    """Load a data set by name, one of `DATASETS`, as its official training and test splits.

    Args:
        name: e.g. "cifar10"; unknown names are refused with the nearest one.
        folder: the data folder; by default that of `FEDEXP_DATA`, or else the user's cache.
    """
    return find(name).load(folder)
