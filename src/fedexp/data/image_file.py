"""One image file as an array of bytes; also a small program that does so for many.

The program imports nothing of the package, so that a process which runs it starts at once.
"""

from __future__ import annotations

import json
import struct
import sys
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Size = tuple[int, int]
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
        with Image.open(path) as image:
            shown = image.convert(mode)
    # pillow raises SyntaxError for a broken PNG, and its own error for what looks like an attack
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError("not an image that can be read; remove or replace it") from error
    if size is not None and (shown.height, shown.width) != size:
        if not resize:
            raise ValueError(f"is {shown.height}x{shown.width} pixels, not {size[0]}x{size[1]}")
        shown = shown.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return planes(shown)


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
