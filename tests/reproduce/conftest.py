"""Fixtures for the tests of studies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.generated_data import write_images


@pytest.fixture
def generated_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of small generated images: 1,200 for training (4 EMNIST writers), 40 for tests.

    Brightness depends on the label, so that there is something to learn.
    """
    folder = tmp_path / "data"
    write_images(folder, "emnist", "cifar10", "cifar100", "cinic10")
    monkeypatch.setenv("FEDEXP_DATA", str(folder))
    return folder
