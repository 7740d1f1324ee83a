"""Image files and folders of them as uint8 arrays, decoded on all cores.

Decoding a small image is mostly Python code, which the GIL serialises: for 32x32 PNG files two
threads are no faster than one. So each block of files is decoded by a process of its own, as many
at a time as there are cores. It runs `image_file.py` as a program, which imports nothing of this
package and starts in a fraction of the time that a block takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources import image_file
from fedexp.data.sources.download import progress
from fedexp.data.sources.image_file import Bytes, Size
from fedexp.errors import UsageError, check_name, require
from fedexp.optional import extra

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})
BLOCK = 2**24  # bytes of the images that a process decodes, at three channels


def read_folder(
    root: Path,
    client: int | Callable[[PurePath], Any],
    classes: Sequence[str] | None,
    size: Size | None,
    mode: str,
) -> tuple[dict[str, NDArray[Any]], list[Any]]:
    """Read the fields `x` and `y` of all images in a folder tree, and the client of each.

    The arguments are those of `Federation.from_image_folder`.
    """
    require(root.is_dir(), f"{root}: no such folder of images")
    images = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    paths = sorted(path for path in images if path.is_file())  # opening a pipe would block
    require(len(paths) > 0, f"{root}: holds no images; supported are {', '.join(sorted(SUFFIXES))}")
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
        f"{root / path}: no folder of level {client} above the class folder to name the client; "
        "give client as a function of the path",
    )
    return folders[client]


def _labels(
    paths: Sequence[PurePath], classes: Sequence[str] | None, root: Path
) -> NDArray[np.int64]:
    """Return the label of each image: the index of its folder's name in the classes."""
    names = [path.parent.name for path in paths]
    order = list(classes) if classes is not None else sorted(set(names))
    for name in names:
        check_name(f"class folder in {root}", name, order)
    label = {name: index for index, name in enumerate(order)}
    return np.array([label[name] for name in names], dtype=np.int64)


def decode(path: Path, mode: str = "RGB", size: Size | None = None, resize: bool = False) -> Bytes:
    """Decode one image to uint8 [channels, height, width]; arguments as for `read_image`."""
    extra("PIL.Image", "reading images", package="pillow")
    try:
        return image_file.read_image(path, mode, size, resize)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def decode_all(
    paths: Sequence[Path], mode: str, size: Size, resize: bool = False, what: str = "images"
) -> Iterator[Bytes]:
    """Yield blocks of decoded images, in the order of the paths, with a progress bar on stderr."""
    length = max(1, BLOCK // (3 * size[0] * size[1]))
    blocks = [paths[start : start + length] for start in range(0, len(paths), length)]
    count = min(available_cores(), len(blocks))
    decode_block = _decode_in_process if count > 1 else _decode_block
    decoding = partial(decode_block, mode=mode, size=size, resize=resize)
    with progress(f"decoding {what}", len(paths)) as advance, ThreadPoolExecutor(count) as threads:
        for images in threads.map(decoding, blocks) if count > 1 else map(decoding, blocks):
            yield images
            advance(len(images))


def _decode_block(block: Sequence[Path], mode: str, size: Size, resize: bool) -> Bytes:
    return np.stack([decode(path, mode, size, resize) for path in block])


def _decode_in_process(block: Sequence[Path], mode: str, size: Size, resize: bool) -> Bytes:
    """Decode in a new process; in this one if that fails, which names the bad file if any."""
    request = json.dumps([[os.fspath(path) for path in block], mode, size, resize])
    # by path, so that the package is not imported
    command = [sys.executable, "-P", os.fspath(image_file.__file__)]
    process = subprocess.run(command, input=request.encode(), capture_output=True)
    if process.returncode != 0:
        return _decode_block(block, mode, size, resize)
    return np.frombuffer(process.stdout, np.uint8).reshape(len(block), -1, *size)


def available_cores() -> int:
    """Return the number of cores this process may use, at most those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
