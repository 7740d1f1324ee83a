"""Small searches, and callbacks that record and stop trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fedexp as fx
from fedexp.experiment import Row
from fedexp.tuning.results import Tuning
from fedexp.tuning.search import Trial, TrialResult

SMALL = {"task.clients": "4", "task.rows": "3", "task.dim": "20"}
OPTIONS = [word for pair in SMALL.items() for word in ("--set", "=".join(pair))]


def small_tune(
    algorithm: str = "fedavg", grid: Any = None, *, rounds: int = 12, **settings: Any
) -> Tuning:
    """Tune a regression whose trials take a fraction of a second."""
    return fx.tune("synthetic", algorithm, grid, options=SMALL, rounds=rounds, **settings)


def scores(trials: list[Trial]) -> list[tuple[Mapping[str, float], TrialResult]]:
    """Return what does not depend on where trials are stored."""
    return [(trial.point, trial.result) for trial in trials]


class StartedTrials:
    """Records which trials start, as `on_round`; may interrupt one in its second round."""

    def __init__(self, interrupt_in_trial: int = 0) -> None:
        self.points: list[Mapping[str, float]] = []
        self._interrupt_in_trial = interrupt_in_trial

    def __call__(self, point: Mapping[str, float], row: Row) -> None:
        if row["round"] == 1:
            self.points.append(point)
            self.on_start()
        if len(self.points) == self._interrupt_in_trial and row["round"] == 2:
            raise KeyboardInterrupt

    def on_start(self) -> None:
        """Called when a trial has started; for subclasses."""
