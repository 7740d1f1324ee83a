"""`Outcome`: the rows of a run and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.experiments.spec import Spec

Row = dict[str, Any]
OnRound = Callable[[Spec, Row], None]


@dataclass(frozen=True)
class Outcome:
    """What came out of a run: one row of numbers a round, and how it ended.

    Attributes:
        spec: what was run.
        rows: one a round.
        seconds: time in all.
        diverged_at: the round in which the run left the range of sensible numbers, if it did.
        status: "finished", "diverged", "target" for one that stopped there, or "unfinished".
        reason: what diverged.
        folder: where the run is kept; None where it is not.
        stored: how many of the rounds were there before.
    """

    spec: Spec
    rows: list[Row]
    seconds: float
    diverged_at: int | None = None
    status: str = "finished"
    reason: str = ""
    folder: Path | None = None
    stored: int = 0

    def curve(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One number a round, NaN where it was not evaluated."""
        values = [row.get(name) for row in self.rows]
        known = [v if isinstance(v, int | float) else np.nan for v in values]
        return np.array(known, dtype=np.float64)
