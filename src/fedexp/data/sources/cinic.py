"""A folder of images as arrays: labels from folder names, clients from a level or a function.

CINIC-10, from its folders of PNG files: `{train,valid,test}/<class>/*.png`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources.cache import Arrays, Stream
from fedexp.data.sources.decode import decode, decode_all
from fedexp.data.sources.image_file import Size
from fedexp.errors import UsageError, require, unknown_name

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})


def read_folder(
    root: Path,
    client: int | Callable[[PurePath], Any],
    classes: Sequence[str] | None,
    size: Size | None,
    mode: str,
) -> tuple[dict[str, NDArray[Any]], list[Any]]:
    """The fields `x` and `y` of all images below a folder, and the client of each.

    The arguments are those of `Federation.from_image_folder`.
    """
    require(root.is_dir(), f"{root}: no such folder of images")
    found = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    paths = sorted(path for path in found if path.is_file())  # a pipe would be waited for
    require(len(paths) > 0, f"{root}: holds no images; known are {', '.join(sorted(SUFFIXES))}")
    below = [path.relative_to(root) for path in paths]
    ids = [_client(path, client, root) for path in below]
    shape = size or decode(paths[0], mode).shape[1:]
    blocks = decode_all(paths, mode, (shape[0], shape[1]), resize=size is not None)
    return {"x": np.concatenate(list(blocks)), "y": _labels(below, classes, root)}, ids


def _client(path: PurePath, client: int | Callable[[PurePath], Any], root: Path) -> Any:
    if not isinstance(client, int):
        return client(path)
    folders = path.parts[:-1]
    require(
        0 <= client < len(folders) - 1,
        f"{root / path}: no folder of level {client} above the class folder names the client; "
        "give client as a function of the path",
    )
    return folders[client]


def _labels(
    paths: Sequence[PurePath], classes: Sequence[str] | None, root: Path
) -> NDArray[np.int64]:
    """The label of each image: its folder's place in the list of classes."""
    names = [path.parent.name for path in paths]
    order = list(classes) if classes is not None else sorted(set(names))
    for name in names:
        if name not in order:
            raise unknown_name(f"class folder in {root}", name, order)
    place = {name: label for label, name in enumerate(order)}
    return np.array([place[name] for name in names], dtype=np.int64)


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
