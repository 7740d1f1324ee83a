"""CIFAR-10 and CIFAR-100, from the official Python archives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import check_labels
from fedexp.data.sources.cache import Arrays
from fedexp.data.sources.download import Source, archive_of
from fedexp.data.sources.safe_pickle import read_pickle
from fedexp.errors import UsageError

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]

CIFAR10 = archive_of("cifar10")
CIFAR100 = archive_of("cifar100")
FILES10 = (
    *("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    "test_batch",
)
FILES100 = ("train", "test")


def _locate(source: Source, names: tuple[str, ...], root: Path) -> list[Path]:
    """Return the files of a data set in a data folder, the test file last; none if it is absent."""
    return [folder / name for folder in source.files(root) for name in names]


def _build(key: str, classes: int, files: list[Path]) -> Arrays:
    """Read the arrays of a data set, with the labels that have this key."""
    *train, (test_x, test_y) = [read_batch(path, key, classes) for path in files]
    return {
        "train_x": np.concatenate([x for x, _ in train]),
        "train_y": np.concatenate([y for _, y in train]),
        "test_x": test_x,
        "test_y": test_y,
    }


locate10, locate100 = partial(_locate, CIFAR10, FILES10), partial(_locate, CIFAR100, FILES100)
build10, build100 = partial(_build, "labels", 10), partial(_build, "fine_labels", 100)


def read_batch(path: Path, key: str, classes: int) -> Examples:
    """Read the images and labels of one file.

    Args:
        path: the pickle file.
        key: key of the labels.
        classes: number of classes.
    """
    content = read_pickle(path)
    pixels, labels = _entry(content, "data", path), _entry(content, key, path)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (3072,)
    ):
        raise UsageError(f"{path}: 'data' is not a uint8 array with 3072 columns")
    checked = check_labels(_as_integers(labels, path), classes, path)
    if len(checked) != len(pixels):
        raise UsageError(f"{path}: has {len(pixels)} images and {len(checked)} labels")
    return pixels.reshape(-1, 3, 32, 32), checked


def _entry(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise UsageError(f"{path}: has no {key!r}; it is not a file of this data set")
    return content[key]


def _as_integers(labels: Any, path: Path) -> NDArray[Any]:
    """Return the labels as an array; nested lists, which may expand without bound, are refused."""
    listed = isinstance(labels, list | tuple) and all(isinstance(label, int) for label in labels)
    if not listed and not isinstance(labels, np.ndarray):
        raise UsageError(f"{path}: labels are not a list of whole numbers")
    array = np.asarray(labels)
    return array if array.size else array.astype(np.int64)
