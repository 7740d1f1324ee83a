"""Small studies for the tests of tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedexp.runs.spec import Spec
from fedexp.tune.grids import Values, paper_grid
from fedexp.tune.search import Protocol, Study

SMALL = {"task.clients": "4", "task.rows": "3", "task.dim": "20"}


def small_study(
    path: Path,
    algorithm: str = "fedavg",
    protocol: Protocol = "paper",
    values: Values | None = None,
    rounds: int = 12,
    trials: int = 0,
    **spec: Any,
) -> Study:
    """A study of a regression so small that a trial takes a fraction of a second."""
    run = Spec(
        "synthetic", algorithm, rounds=rounds, options=tuple(SMALL.items()), **spec
    ).prepare()
    grid = paper_grid(run.setup, run.task.sums) if values is None else values
    return Study(run, protocol, grid, path, trials)
