"""CINIC-10, from its folders of PNG files: `{train,test}/<class>/*.png`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedexp.data.sources.cache import Arrays, Stream
from fedexp.data.sources.download import archive_of
from fedexp.data.sources.image_folder import decode_all
from fedexp.errors import UsageError

CINIC10 = archive_of("cinic10")
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


def locate(root: Path) -> list[Path]:
    """Return the class folders of both splits, in the order of the labels; none if absent."""
    return [split / name for split in CINIC10.files(root) for name in CLASSES]


def build(folders: list[Path]) -> Arrays:
    """Read the arrays of the official training and test splits.

    Args:
        folders: the ten training folders, then the ten test folders.
    """
    return {**build_split(folders[:10], "train"), **build_split(folders[10:], "test")}


def build_split(folders: list[Path], split: str) -> Arrays:
    """Read the arrays of one split, sorted by class and then by file name."""
    by_class = [_png_files(folder) for folder in folders]
    paths = [path for paths in by_class for path in paths]
    labels = np.repeat(np.arange(len(by_class)), [len(paths) for paths in by_class])
    blocks = decode_all(paths, "RGB", (32, 32), what=f"CINIC-10 {split}")
    return {
        f"{split}_x": Stream((len(paths), 3, 32, 32), np.uint8, blocks),
        f"{split}_y": labels.astype(np.int64),
    }


def _png_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such class folder; unpack the archive again")
    paths = sorted(path for path in folder.glob("*.png") if path.is_file())
    if not paths:
        raise UsageError(f"{folder}: holds no .png files; unpack the archive again")
    return paths
