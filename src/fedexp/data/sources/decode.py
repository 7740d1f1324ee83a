"""Many image files into arrays of bytes, on all cores.

A small image is mostly work in Python, which threads of one process have to take turns at: with
32x32 PNG files two threads are no faster than one. So blocks of files go to helper processes, and
this one spends some 3 microseconds an image on them, against 140 that a helper does.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fedexp.data.sources import image_file
from fedexp.data.sources.download import progress
from fedexp.data.sources.image_file import LENGTH, Bytes, Size
from fedexp.errors import UsageError
from fedexp.optional import extra

BLOCK = 512  # files handed to a helper at a time
FEW = 2048  # files below which starting helpers is not worth it
MOST = 32  # helpers; more would wait for the disk

Helper = subprocess.Popen[bytes]
Block = Sequence[Path]


class How(NamedTuple):
    """How images are to be read; see `read_image`."""

    mode: str
    size: Size
    resize: bool


def decode(path: Path, mode: str = "RGB", size: Size | None = None, resize: bool = False) -> Bytes:
    """One image file as bytes (channels, rows, columns); arguments as for `read_image`."""
    extra("PIL.Image", "reading images", package="pillow")
    try:
        return image_file.read_image(path, mode, size, resize)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def decode_all(
    paths: Sequence[Path], mode: str, size: Size, resize: bool = False, what: str = "images"
) -> Iterator[Bytes]:
    """Blocks of decoded images, in the order of the paths, with a progress bar on stderr."""
    blocks = [paths[start : start + BLOCK] for start in range(0, len(paths), BLOCK)]
    workers = min(_cores(), len(blocks), MOST) if len(paths) >= FEW else 1
    how = How(mode, size, resize)
    decoded = _in_parallel(blocks, how, workers) if workers > 1 else (_here(b, how) for b in blocks)
    with progress(f"decoding {what}", len(paths)) as advance:
        for images in decoded:
            yield images
            advance(len(images))


def _here(block: Block, how: How) -> Bytes:
    return np.stack([decode(path, *how) for path in block])


def _in_parallel(blocks: Sequence[Block], how: How, workers: int) -> Iterator[Bytes]:
    """The decoded blocks; a thread for each helper waits for its answers."""
    idle: queue.SimpleQueue[Helper] = queue.SimpleQueue()

    def lend(block: Block) -> Bytes:
        helper = idle.get()
        try:
            return _elsewhere(helper, block, how)
        finally:
            idle.put(helper)

    with _helpers(workers) as helpers, ThreadPoolExecutor(workers) as threads:
        for helper in helpers:
            idle.put(helper)
        yield from threads.map(lend, blocks)


def _elsewhere(helper: Helper, block: Block, how: How) -> Bytes:
    question = json.dumps([[os.fspath(path) for path in block], *how])
    content = _answer(helper, question.encode() + b"\n")
    if not content:  # decode it here, which names the bad file if there is one
        return _here(block, how)
    return np.frombuffer(content, np.uint8).reshape(len(block), -1, *how.size)


@contextmanager
def _helpers(count: int) -> Iterator[list[Helper]]:
    """Processes that decode, ended whatever happens."""
    helpers: list[Helper] = []
    try:
        helpers.extend(_start() for _ in range(count))
        yield helpers
    finally:
        for helper in helpers:
            helper.kill()
            helper.communicate()


def _start() -> Helper:
    """Run the program in `image_file`; by its path, so that the package is not imported."""
    command = [sys.executable, "-P", os.fspath(image_file.__file__)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)


def _answer(helper: Helper, question: bytes) -> bytes:
    """What a helper answers; nothing if it cannot."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        helper.stdin.write(question)
        helper.stdin.flush()
    except OSError:  # it has ended
        return b""
    return _exactly(helper.stdout, LENGTH.unpack(_exactly(helper.stdout, 8) or bytes(8))[0])


def _exactly(stream: IO[bytes], length: int) -> bytes:
    content = stream.read(length)
    return content if len(content) == length else b""


def _cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
