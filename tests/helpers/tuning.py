"""Small studies, and progress callbacks that record and stop trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedexp.experiment import Row
from fedexp.runs.spec import Spec
from fedexp.tuning.grids import Point, Values, paper_grid
from fedexp.tuning.search import OnRow, Protocol, Study

SMALL = {"task.clients": "4", "task.rows": "3", "task.dim": "20"}
OPTIONS = [word for pair in SMALL.items() for word in ("--set", "=".join(pair))]


def small_study(
    path: Path,
    algorithm: str = "fedavg",
    protocol: Protocol = "paper",
    values: Values | None = None,
    rounds: int = 12,
    trials: int = 0,
    **spec: Any,
) -> Study:
    """Return a study of a regression whose trials take a fraction of a second."""
    run = Spec(
        "synthetic", algorithm, rounds=rounds, options=tuple(SMALL.items()), **spec
    ).prepare()
    grid = paper_grid(run.setup, run.task.sums) if values is None else values
    return Study(run, protocol, grid, path, trials)


class StartedTrials:
    """Progress that records which trials start; may interrupt one in its second round."""

    def __init__(self, interrupt_in_trial: int = 0) -> None:
        self.left = 0
        self.points: list[Point] = []
        self._interrupt_in_trial = interrupt_in_trial

    @contextmanager
    def __call__(self, left: int) -> Iterator[OnRow]:
        self.left = left
        yield self._on_row

    def _on_row(self, point: Point, row: Row) -> None:
        if row["round"] == 1:
            self.points.append(point)
            self.on_start()
        if len(self.points) == self._interrupt_in_trial and row["round"] == 2:
            raise KeyboardInterrupt

    def on_start(self) -> None:
        """Called when a trial has started; for subclasses."""
