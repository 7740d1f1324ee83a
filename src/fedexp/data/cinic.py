"""CINIC-10, from its folders of PNG files: `{train,valid,test}/<class>/*.png`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fedexp.data.cache import Arrays, Stream
from fedexp.data.decode import decode_all
from fedexp.errors import UsageError

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


def class_folders(split: Path) -> list[Path]:
    """The ten folders of a split, in the order of the labels, which is that of CIFAR-10."""
    return [split / name for name in CLASSES]


def build(folders: list[Path]) -> Arrays:
    """The arrays of the official training and test splits.

    Args:
        folders: the ten training folders, then the ten test folders.
    """
    return {**build_split(folders[:10], "train"), **build_split(folders[10:], "test")}


def build_split(folders: list[Path], split: str) -> Arrays:
    """The arrays of one split: class after class, and by file name within a class."""
    by_class = [_pictures(folder) for folder in folders]
    paths = [path for paths in by_class for path in paths]
    labels = np.repeat(np.arange(len(by_class)), [len(paths) for paths in by_class])
    blocks = decode_all(paths, "RGB", (32, 32), what=f"CINIC-10 {split}")
    return {
        f"{split}_x": Stream((len(paths), 3, 32, 32), np.uint8, blocks),
        f"{split}_y": labels.astype(np.int64),
    }


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; CINIC-10 has one for each of its ten classes")
    with os.scandir(folder) as entries:
        files = (entry for entry in entries if entry.is_file())
        names = sorted(entry.name for entry in files if entry.name.endswith(".png"))
    if not names:
        raise UsageError(f"{folder}: holds no .png files; unpack the archive again")
    return [folder / name for name in names]
