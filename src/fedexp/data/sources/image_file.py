"""One image file as a uint8 array; also a program that decodes many files.

It is a separate file because processes run it by path: it imports nothing of the package, so they
start quickly.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Size = tuple[int, int]
# Formats that are read, whatever the suffix; others may start programs (EPS starts Ghostscript).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MAX_BYTES = 2**28  # of a file
MAX_PIXELS = 2**26  # of an image; a header of a few bytes can claim billions


def planes(image: Any) -> Bytes:
    """Convert a PIL image to uint8 [channels, height, width]."""
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def read_image(
    path: str | PathLike[str], mode: str, size: Size | None = None, resize: bool = False
) -> Bytes:
    """Decode an image file to uint8 [channels, height, width]; raise ValueError if it is bad.

    Args:
        path: the file, in one of `FORMATS`.
        mode: "RGB" for colour, "L" for greyscale; images of other modes are converted.
        size: required height and width, or None for any.
        resize: whether to resize an image of another size instead of refusing it.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about harmless damage
            with Image.open(_read_file(path), formats=FORMATS) as image:
                fault = _size_fault(image.height, image.width, None if resize else size)
                decoded = None if fault else image.convert(mode)
    # A damaged image makes pillow raise nearly anything: SyntaxError for a broken PNG, for one.
    except Exception as error:
        raise ValueError("not an image that can be read; remove or replace it") from error
    if decoded is None:
        raise ValueError(fault)
    if size is not None and (decoded.height, decoded.width) != size:
        decoded = decoded.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return planes(decoded)


def _read_file(path: str | PathLike[str]) -> io.BytesIO:
    """Read a file into memory, so that no decoder allocates a length that a header claims."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return io.BytesIO(file.read())


def _size_fault(rows: int, columns: int, size: Size | None) -> str:
    """Return why an image of this size is refused, or an empty string."""
    if size is not None and (rows, columns) != size:
        return f"is {rows}x{columns} pixels, not {size[0]}x{size[1]}"
    return f"is {rows}x{columns} pixels, which is too large" if rows * columns > MAX_PIXELS else ""


def main() -> None:
    """Write the images of a request on stdin (paths, mode, size, resize) to stdout, one by one."""
    paths, mode, size, resize = json.load(sys.stdin)
    for path in paths:
        sys.stdout.buffer.write(read_image(path, mode, tuple(size), resize).tobytes())


if __name__ == "__main__":
    main()
