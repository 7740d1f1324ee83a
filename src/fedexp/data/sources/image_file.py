"""One image file as an array of bytes; also a small program that does so for many.

The program imports nothing of the package, so that a process which runs it starts at once.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import warnings
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Size = tuple[int, int]
# What is read, whatever a file is called: some other formats start programs (EPS: Ghostscript).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MOST_BYTES = 2**28  # of a file
MOST_PIXELS = 2**26  # of an image that is read; a few bytes can claim billions
LENGTH = struct.Struct("<q")


def planes(image: Any) -> Bytes:
    """An image of the library pillow as bytes (channels, rows, columns)."""
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def read_image(
    path: str | PathLike[str], mode: str, size: Size | None = None, resize: bool = False
) -> Bytes:
    """One image file as bytes (channels, rows, columns); ValueError where that cannot be.

    Args:
        path: the file, in any format that pillow reads.
        mode: "RGB" for colour, "L" for grey; an image of another kind is converted.
        size: rows and columns the image must have, or None for any.
        resize: whether an image of another size is brought to `size` instead of refused.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damage that does not matter
            with Image.open(_content(path), formats=FORMATS) as image:
                fault = _size_fault(image.height, image.width, None if resize else size)
                shown = None if fault else image.convert(mode)
    # A damaged image makes pillow raise nearly anything: SyntaxError for a broken PNG, for one.
    except Exception as error:
        raise ValueError("not an image that can be read; remove or replace it") from error
    if shown is None:
        raise ValueError(fault)
    if size is not None and (shown.height, shown.width) != size:
        shown = shown.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return planes(shown)


def _content(path: str | PathLike[str]) -> io.BytesIO:
    """A file in memory: a read of a length that it only claims would allocate that length."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return io.BytesIO(file.read())


def _size_fault(rows: int, columns: int, size: Size | None) -> str:
    """Why an image is not decoded; nothing where it may be."""
    if size is not None and (rows, columns) != size:
        return f"is {rows}x{columns} pixels, not {size[0]}x{size[1]}"
    return f"is {rows}x{columns} pixels, which is too large" if rows * columns > MOST_PIXELS else ""


def serve() -> None:
    """Answer each line, a list of paths and how to read them, by a length and as many bytes.

    A length of 0 says that a file could not be read; whoever asked finds out which.
    """
    for line in sys.stdin.buffer:
        paths, mode, (rows, columns), resize = json.loads(line)
        try:
            images = [read_image(path, mode, (rows, columns), resize).tobytes() for path in paths]
        except ValueError:
            images = []
        content = b"".join(images)
        sys.stdout.buffer.write(LENGTH.pack(len(content)) + content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
