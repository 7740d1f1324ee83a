"""Fixtures for the tests of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedexp.data.sources import cache
from fedexp.data.sources.download import cache_path

CLASSES = {"emnist": 62, "cifar10": 10, "cifar100": 100, "cinic10": 10}


@pytest.fixture
def generated_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of small generated images: 1,200 for training (4 EMNIST writers), 40 for tests.

    Brightness depends on the label, so that there is something to learn.
    """
    folder = tmp_path / "data"
    for name, classes in CLASSES.items():
        shape = (1, 28, 28) if name == "emnist" else (3, 32, 32)
        arrays: dict[str, NDArray[Any]] = {}
        for split, count in {"train": 1200, "test": 40}.items():
            rng = np.random.default_rng(count)
            y = rng.integers(classes, size=count)
            bright = (y * 175 // (classes - 1)).reshape(-1, 1, 1, 1)
            noise = rng.integers(80, size=(count, *shape))
            arrays |= {f"{split}_x": (noise + bright).astype(np.uint8), f"{split}_y": y}
        if name == "emnist":
            arrays["offsets"] = np.array([0, 1, 30, 600, 1200])
        cache.write(cache_path(folder, name), arrays, {"format": cache.FORMAT})
    monkeypatch.setenv("FEDEXP_DATA", str(folder))
    return folder
