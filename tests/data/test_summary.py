"""Class counts of a federation, and their figures."""

from pathlib import Path

import numpy as np
import pytest

from fedexp.data import Federation, summary
from fedexp.errors import UsageError


def test_many_clients_are_drawn_as_a_heat_map(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (300, 10))
    summary.draw(counts, tmp_path / "a.png", "many")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(UsageError, match="cannot draw"):
        summary.draw(counts, tmp_path / "a.nothing", "many")


def test_class_counts() -> None:
    federation = Federation.from_ids({"y": np.array([2, 0, 2, 1])}, ["b", "a", "b", "a"])
    assert summary.class_counts(federation, 4).tolist() == [[1, 1, 0, 0], [0, 0, 2, 0]]
