"""Fixtures that write small data sets in the official layouts, and find the real ones."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedexp.data.datasets import DATASETS
from fedexp.data.sources import cinic
from fedexp.data.sources.download import cache_path

Arrays = dict[str, NDArray[Any]]
Write = Callable[[Path], Arrays]


def made_images(rows: int, classes: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
    return pixels, np.arange(rows, dtype=np.int64) % classes


def dump(path: Path, key: str, images: NDArray[Any], labels: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = np.ascontiguousarray(images.reshape(len(images), 3072))
    content = {b"data": flat, key.encode(): labels.tolist(), b"batch_label": b"made"}
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def write_cifar10() -> Write:
    def write(folder: Path) -> Arrays:
        x, y = made_images(60, 10, seed=1)
        names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        for i, name in enumerate(names):
            rows = slice(10 * i, 10 * i + 10)
            dump(folder / "cifar-10-batches-py" / name, "labels", x[rows], y[rows])
        return {"train_x": x[:50], "train_y": y[:50], "test_x": x[50:], "test_y": y[50:]}

    return write


@pytest.fixture
def write_cifar100() -> Write:
    def write(folder: Path) -> Arrays:
        x, y = made_images(120, 100, seed=2)
        for name, rows in (("train", slice(100)), ("test", slice(100, 120))):
            dump(folder / "cifar-100-python" / name, "fine_labels", x[rows], y[rows])
        return {"train_x": x[:100], "train_y": y[:100], "test_x": x[100:], "test_y": y[100:]}

    return write


@pytest.fixture
def write_cinic10() -> Write:
    def write(folder: Path) -> Arrays:
        arrays: Arrays = {}
        for seed, split in enumerate(("train", "test")):
            x, _ = made_images(20, 10, seed)
            y = np.repeat(np.arange(10), 2)
            for i, (image, label) in enumerate(zip(x, y, strict=True)):
                path = folder / "CINIC-10" / split / cinic.CLASSES[label] / f"cifar10-{i:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.transpose(1, 2, 0)).save(path)
            arrays |= {f"{split}_x": x, f"{split}_y": y}
        return arrays

    return write


def made_writers() -> dict[str, dict[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Return five writers of unequal size, not sorted by name; one has a single example."""
    rng = np.random.default_rng(3)
    sizes = {"f2_00": 7, "f0_14": 3, "f1_09": 1, "f0_02": 12, "f3_31": 2}
    return {
        split: {
            writer: (
                rng.integers(0, 256, (n, 28, 28), dtype=np.uint8),
                rng.integers(0, 62, n),
            )
            for writer, n in sizes.items()
        }
        for split in ("train", "test")
    }


def expected_writers() -> Arrays:
    arrays: Arrays = {}
    for split, writers in made_writers().items():
        ordered = [writers[name] for name in sorted(writers)]
        arrays[f"{split}_x"] = np.concatenate([x for x, _ in ordered])[:, None]
        arrays[f"{split}_y"] = np.concatenate([y for _, y in ordered])
        arrays["offsets"] = np.cumsum([0, *(len(y) for _, y in ordered)])
    return arrays


@pytest.fixture
def write_emnist() -> Write:
    import h5py

    def write(folder: Path) -> Arrays:
        folder.mkdir(parents=True, exist_ok=True)
        for split, writers in made_writers().items():
            with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
                for name, (x, y) in writers.items():
                    group = file.create_group(f"examples/{name}")
                    group["pixels"] = x.astype(np.float32) / 255
                    group["label"] = y.astype(np.int32)
        return expected_writers()

    return write


@pytest.fixture
def write_leaf() -> Write:
    """Write the same writers in LEAF's layout, in two files per split."""

    def write(folder: Path) -> Arrays:
        for split, writers in made_writers().items():
            (folder / "femnist" / split).mkdir(parents=True)
            names = list(writers)
            for i, own in enumerate((names[:2], names[2:])):
                users = {
                    name: {"x": (x.reshape(len(x), -1) / 255).tolist(), "y": y.tolist()}
                    for name, (x, y) in ((name, writers[name]) for name in own)
                }
                sizes = [len(writers[name][1]) for name in own]
                content = {"users": own, "num_samples": sizes, "user_data": users}
                path = folder / "femnist" / split / f"all_data_{i}_niid_0_keep_0_{split}_9.json"
                path.write_text(json.dumps(content))
        return expected_writers()

    return write


@pytest.fixture(scope="session")
def real_folder() -> Callable[[str], Path]:
    """Return the folder that `FEDEXP_DATA` names; skip the test if it lacks the data set."""

    def need(name: str) -> Path:
        named = os.environ.get("FEDEXP_DATA")
        if not named:
            pytest.skip("FEDEXP_DATA is not set, so there is no real data to test on")
        folder = Path(named)
        if not DATASETS[name].locate(folder) and not cache_path(folder, name).exists():
            pytest.skip(f"{name} is not in the folder that FEDEXP_DATA names")
        return folder

    return need
