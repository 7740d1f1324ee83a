"""Image files and folders of them as uint8 arrays, decoded on all cores.

Decoding a small image is mostly Python code, which the GIL serialises: for 32x32 PNG files two
threads are no faster than one. So blocks of files go to worker processes. Each runs
`image_file.py` as a program, which imports nothing of this package and starts in milliseconds. The
parent spends about 3 microseconds per image, a worker 140.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources import image_file
from fedexp.data.sources.download import progress
from fedexp.data.sources.image_file import LENGTH, Bytes, Size
from fedexp.errors import UsageError, require, unknown_name
from fedexp.optional import extra

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"})
BLOCK = 512  # files per request to a worker
MIN_PARALLEL = 2048  # files below which workers are not worth their start
MAX_WORKERS = 32  # more would wait for the disk

Worker = subprocess.Popen[bytes]
Block = Sequence[Path]


class Options(NamedTuple):
    """Arguments of `read_image` for a whole block."""

    mode: str
    size: Size
    resize: bool


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
    found = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    paths = sorted(path for path in found if path.is_file())  # opening a pipe would block
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
        if name not in order:
            raise unknown_name(f"class folder in {root}", name, order)
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
    blocks = [paths[start : start + BLOCK] for start in range(0, len(paths), BLOCK)]
    count = min(available_cores(), len(blocks), MAX_WORKERS) if len(paths) >= MIN_PARALLEL else 1
    options = Options(mode, size, resize)
    if count > 1:
        decoded = _decode_in_workers(blocks, options, count)
    else:
        decoded = (_decode_block(block, options) for block in blocks)
    with progress(f"decoding {what}", len(paths)) as advance:
        for images in decoded:
            yield images
            advance(len(images))


def _decode_block(block: Block, options: Options) -> Bytes:
    return np.stack([decode(path, *options) for path in block])


def _decode_in_workers(blocks: Sequence[Block], options: Options, count: int) -> Iterator[Bytes]:
    """Yield the decoded blocks in order; one thread per worker waits for its replies."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def decode_block(block: Block) -> Bytes:
        worker = idle.get()
        try:
            request = json.dumps([[os.fspath(path) for path in block], *options])
            content = _reply(worker, request.encode() + b"\n")
        finally:
            idle.put(worker)
        if not content:  # decode it in this process, which names the bad file if there is one
            return _decode_block(block, options)
        return np.frombuffer(content, np.uint8).reshape(len(block), -1, *options.size)

    with _workers(count) as workers, ThreadPoolExecutor(count) as threads:
        for worker in workers:
            idle.put(worker)
        yield from threads.map(decode_block, blocks)


@contextmanager
def _workers(count: int) -> Iterator[list[Worker]]:
    """Start worker processes, and kill them at the end of the block."""
    # by path, so that the package is not imported
    command = [sys.executable, "-P", os.fspath(image_file.__file__)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    workers: list[Worker] = []
    try:
        workers.extend(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null) for _ in range(count)
        )
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _reply(worker: Worker, request: bytes) -> bytes:
    """Send a request and return the reply; empty if the worker has failed."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
    except OSError:  # it has ended
        return b""
    (length,) = LENGTH.unpack(_read_exactly(worker.stdout, LENGTH.size) or bytes(LENGTH.size))
    return _read_exactly(worker.stdout, length)


def _read_exactly(stream: IO[bytes], length: int) -> bytes:
    content = stream.read(length)
    return content if len(content) == length else b""


def available_cores() -> int:
    """Return the number of cores this process may use, at most those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
