"""Federated EMNIST: handwritten characters, each client one writer. 62 classes: 0-9, A-Z, a-z.

Two layouts give the same arrays: the HDF5 files of TensorFlow Federated,
`/examples/<writer>/{pixels,label}`, and the JSON files of LEAF,
`{train,test}/all_data_*.json` with `user_data: {<writer>: {x, y}}`. Both hold grey values divided
by 255, so `round(255 * x)` restores the original bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedexp.data.federation import check_labels
from fedexp.data.sources.cache import Arrays, Stream
from fedexp.data.sources.download import archive_of, damage_named, progress
from fedexp.errors import UsageError, shown
from fedexp.optional import extra

EMNIST = archive_of("emnist")
CLASSES = EMNIST.classes
SHAPE = (1, 28, 28)
MAX_EXAMPLES = 10_000_000  # of a split; the largest has 671,585
MAX_EXAMPLES_PER_WRITER = 100_000
MAX_CHUNK = 2**26  # bytes that HDF5 reads at a time

Bytes = NDArray[np.uint8]
T = TypeVar("T")


class Split(NamedTuple):
    """One split in the order of writers: examples per writer, labels, and blocks of pixels."""

    sizes: list[int]
    labels: NDArray[np.int64]
    pixels: Iterator[Bytes]


def locate(root: Path) -> list[Path]:
    """Return the HDF5 files, else LEAF's files in `femnist/` or `femnist/data/`, else none."""
    return EMNIST.files(root) or leaf_files(root / "femnist")


def leaf_files(folder: Path) -> list[Path]:
    """Return LEAF's files in a folder or its `data`, training files first; none of one split."""
    for parent in (folder, folder / "data"):
        train, test = (sorted((parent / s).glob("all_data_*.json")) for s in ("train", "test"))
        if train and test:
            return [*train, *test]
    return []


def by_folder(files: Sequence[Path]) -> list[list[Path]]:
    """Return LEAF's files by split."""
    return [list(paths) for _, paths in groupby(files, key=lambda path: path.parent)]


def build(files: list[Path]) -> Arrays:
    """Read the arrays of either layout, which the file names determine."""
    if files[0].suffix == ".h5":
        train, test = (hdf5_split(path) for path in files)
    else:
        train, test = map(leaf_split, by_folder(files))
    sizes = [size for size in train.sizes if size]  # a writer may be in the test split alone
    return {
        "train_x": Stream((len(train.labels), *SHAPE), np.uint8, train.pixels),
        "train_y": train.labels,
        "test_x": Stream((len(test.labels), *SHAPE), np.uint8, test.pixels),
        "test_y": test.labels,
        "offsets": np.cumsum([0, *sizes], dtype=np.int64),
    }


def hdf5_split(path: Path) -> Split:
    """Open a file of TensorFlow Federated; pixels are read lazily, one writer at a time."""
    with hdf5_examples(path) as examples:
        writers = sorted(examples)
        labels: list[NDArray[np.int64]] = []
        left = MAX_EXAMPLES
        for writer in writers:
            labels.append(_hdf5_labels(examples[writer], path, left))
            left -= len(labels[-1])
    if not any(map(len, labels)):
        raise UsageError(f"{path}: has no examples; fetch it again")
    return Split([len(y) for y in labels], np.concatenate(labels), _hdf5_pixels(path, writers))


def _hdf5_labels(writer: Any, path: Path, most: int) -> NDArray[np.int64]:
    """Return a writer's labels; refuse pixels that are not one float image per label.

    A few bytes of HDF5 can claim any number of examples, so sizes are limited before reading: to
    `most` and to the maximum per writer.
    """
    import h5py

    where = f"{path}: writer {shown(writer.name)}"
    arrays: Any = writer if isinstance(writer, h5py.Group) else {}
    pixels, labels = arrays.get("pixels"), arrays.get("label")
    for name, entry in (("pixels", pixels), ("label", labels)):
        if not isinstance(entry, h5py.Dataset):
            raise UsageError(f"{where} has no {name!r} array; fetch the file again")
        chunk = math.prod(entry.chunks or (1,)) * entry.dtype.itemsize
        if entry.ndim < 1 or len(entry) > min(most, MAX_EXAMPLES_PER_WRITER) or chunk > MAX_CHUNK:
            raise UsageError(f"{where} has {name} of shape {entry.shape}; fetch the file again")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(f"{where} has labels that are not a list of whole numbers")
    checked = check_labels(labels[()], CLASSES, where)
    if pixels.shape != (len(checked), *SHAPE[1:]):
        raise UsageError(f"{where} has {len(checked)} labels and pixels of shape {pixels.shape}")
    if pixels.dtype.kind != "f":
        raise UsageError(f"{where} has pixels of {pixels.dtype}, not floats; fetch it again")
    return checked


def _hdf5_pixels(path: Path, writers: Sequence[str]) -> Iterator[Bytes]:
    converting = progress(f"converting {path.name}", len(writers))
    with hdf5_examples(path) as examples, converting as advance:
        for writer in writers:
            where = f"{path}, writer {shown(writer)}"
            yield as_bytes(examples[writer]["pixels"][()], where)
            advance(1)


@contextmanager
def hdf5_examples(path: Path) -> Iterator[Any]:
    """Open the examples in a file of TensorFlow Federated.

    Any exception of the HDF5 library in the block becomes a `UsageError` of one line.
    """
    h5py = extra("h5py", f"reading {path.name}")
    named = damage_named(f"{path}: damaged HDF5 file", "fetch it again")
    with named, h5py.File(path, "r") as file:
        examples = file.get("examples")
        if not isinstance(examples, h5py.Group):
            raise UsageError(
                f"{path}: has no group 'examples'; it is not a file of TensorFlow Federated"
            )
        yield examples


def leaf_split(paths: Sequence[Path]) -> Split:
    """Read the files of a LEAF split, with writers sorted by name as in the HDF5 files.

    A writer's examples may be spread over several files.
    """
    examples: dict[str, list[tuple[Bytes, NDArray[np.int64]]]] = {}
    for writer, piece in leaf_users(paths, _leaf_examples):
        examples.setdefault(writer, []).append(piece)
    sizes = [sum(len(labels) for _, labels in examples[writer]) for writer in sorted(examples)]
    if not any(sizes):
        raise UsageError(f"{paths[0]}: has no examples; fetch it again")
    pieces = [piece for writer in sorted(examples) for piece in examples[writer]]
    labels = np.concatenate([labels for _, labels in pieces])
    return Split(sizes, labels, (pixels for pixels, _ in pieces))


def leaf_users(
    paths: Sequence[Path], convert: Callable[[dict[str, Any], Path], T]
) -> Iterator[tuple[str, T]]:
    """Yield the users in JSON files of LEAF with their converted examples.

    Args:
        paths: the files; a user may be in several.
        convert: converts a user's `x` and `y` to a tuple.
    """
    with progress("converting LEAF", len(paths)) as advance:
        for path in paths:
            yield from _users_of_file(path, convert).items()
            advance(1)


def _users_of_file(path: Path, convert: Callable[[dict[str, Any], Path], T]) -> dict[str, T]:

    def compact(pairs: list[tuple[str, Any]]) -> Any:
        # Called as soon as a user is parsed, so that lists of examples do not accumulate.
        content = dict(pairs)
        return convert(content, path) if content.keys() >= {"x", "y"} else content

    errors = (OSError, ValueError, RecursionError)
    named = damage_named(f"{path}: damaged JSON file", "create it again", errors)
    with named, path.open(encoding="utf-8") as file:
        content = json.load(file, object_pairs_hook=compact)
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict) or not all(isinstance(u, tuple) for u in users.values()):
        raise UsageError(f"{path}: has no 'user_data' with 'x' and 'y' for each user")
    return users


def _leaf_examples(content: dict[str, Any], path: Path) -> tuple[Bytes, NDArray[np.int64]]:
    try:
        labels = np.asarray(content["y"], dtype=None if content["y"] else np.int64)
        pixels = np.asarray(content["x"], dtype=np.float64).reshape(len(labels), *SHAPE)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: a writer's examples are not 784 numbers and a label") from error
    return as_bytes(pixels, path), check_labels(labels, CLASSES, path)


def as_bytes(pixels: ArrayLike, where: object) -> Bytes:
    """Convert grey values from 0 to 1 to uint8, `round(255 * x)`, without loss.

    >>> as_bytes(np.full((1, 28, 28), 1.0), "here")[0, 0, 0, :3]
    array([255, 255, 255], dtype=uint8)
    """
    values = np.asarray(pixels)
    if not ((values >= 0) & (values <= 1)).all():
        raise UsageError(f"{where}: grey values are not all between 0 and 1; fetch the file again")
    return np.rint(255 * values.astype(np.float32)).astype(np.uint8).reshape(-1, *SHAPE)
