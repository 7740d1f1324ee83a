"""CIFAR-10 and CIFAR-100, from the official Python archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources.cache import Arrays
from fedexp.data.sources.safe_pickle import read_pickle
from fedexp.data.sources.splits import check_labels
from fedexp.errors import UsageError

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]

TRAIN10 = tuple(f"data_batch_{i}" for i in range(1, 6))


def files10(folder: Path) -> list[Path]:
    """The files of CIFAR-10 in its folder, training files first."""
    return [folder / name for name in (*TRAIN10, "test_batch")]


def files100(folder: Path) -> list[Path]:
    """The files of CIFAR-100 in its folder."""
    return [folder / name for name in ("train", "test")]


def build10(files: list[Path]) -> Arrays:
    """The arrays of CIFAR-10; its training examples are spread over five files."""
    return _splits(files[:-1], files[-1], "labels", 10)


def build100(files: list[Path]) -> Arrays:
    """The arrays of CIFAR-100 with its fine labels."""
    return _splits(files[:1], files[1], "fine_labels", 100)


def _splits(train: list[Path], test: Path, key: str, classes: int) -> Arrays:
    pieces = [read_batch(path, key, classes) for path in train]
    test_x, test_y = read_batch(test, key, classes)
    return {
        "train_x": np.concatenate([x for x, _ in pieces]),
        "train_y": np.concatenate([y for _, y in pieces]),
        "test_x": test_x,
        "test_y": test_y,
    }


def read_batch(path: Path, key: str, classes: int) -> Examples:
    """The images and labels of one file.

    Args:
        path: the pickle file.
        key: what it calls its labels.
        classes: how many labels there are.
    """
    content = read_pickle(path)
    pixels, labels = _entry(content, "data", path), _entry(content, key, path)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (3072,)
    ):
        raise UsageError(f"{path}: 'data' is not an array of bytes with 3072 columns")
    checked = check_labels(_whole_numbers(labels, path), classes, path)
    if len(checked) != len(pixels):
        raise UsageError(f"{path}: has {len(pixels)} images and {len(checked)} labels")
    return pixels.reshape(-1, 3, 32, 32), checked


def _entry(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise UsageError(f"{path}: has no {key!r}; it is not a file of this data set")
    return content[key]


def _whole_numbers(labels: Any, path: Path) -> NDArray[Any]:
    """The labels as an array. Lists within the list are not gone into: they may unfold for ever."""
    listed = isinstance(labels, list | tuple) and all(isinstance(each, int) for each in labels)
    if not listed and not isinstance(labels, np.ndarray):
        raise UsageError(f"{path}: labels are not a list of whole numbers")
    array = np.asarray(labels)
    return array if array.size else array.astype(np.int64)
