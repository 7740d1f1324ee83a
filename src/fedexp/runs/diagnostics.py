"""Diagnostics of extrapolation: a line for the user when it has no effect, or does harm.

No effect: eps dominates the denominator of the step size, or the clients agree. Both are judged
once, over the first rounds. A large share of eps later is no fault: towards the end of training the
mean update vanishes, and eps is there to bound the step size. Harm: the training loss has doubled,
and is back near its first value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

FIRST_ROUNDS = 20  # cohorts differ from round to round, so a few do not suffice
# Above it eps is larger than ||mean||² itself, and η_g less than half of its value without eps.
# Measured with the defaults of the tasks, the median is 0.14 on digits, 0.01 on digits-mlp and 0.03
# on EMNIST; with eps = 1, nearly FedAvg on digits, it is 0.7.
DOMINATES = 0.5
# The training loss relative to its lowest so far. In the runs of results/ it stays below 1.9 where
# FedExP learns images, and is 2.4 or more where SCAFFOLD-ExP degrades to chance. It is 2.2 with
# FedExP-M, and 2.7 on least squares, far below the first loss: there it only oscillates.
LOSS_RATIO = 2.0
FIRST_LOSS_RATIO = 0.5  # relative to the first loss


class Diagnostics:
    """Judges the rows of a run in order, those before it was resumed included.

    Only rules that extrapolate report `eps_share` and `diversity`; others have no diagnostics.

    Args:
        options: the resolved options of the run, by dotted name.

    >>> diagnostics = Diagnostics({"server.factor": 2.0})
    >>> row = {"eps_share": 0.9, "diversity": 6.0, "clamped": 1.0}
    >>> [line for _ in range(30) for line in diagnostics.see(row)]
    ['eps is 90% of the denominator of the step size ...']
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factor = float(options.get("server.factor", 2.0))
        self._rows: list[Mapping[str, Any]] = []
        self._first, self._lowest, self._degraded = math.nan, math.inf, False

    def see(self, row: Mapping[str, Any]) -> list[str]:
        """Return the lines for this round: mostly none, and none twice."""
        if row.get("eps_share") is None or row.get("diversity") is None:
            return []
        lines = self._judge_loss(row)
        if len(self._rows) < FIRST_ROUNDS:
            self._rows.append(row)
            lines += judge(self._rows, self._factor) if len(self._rows) == FIRST_ROUNDS else []
        return lines

    def _judge_loss(self, row: Mapping[str, Any]) -> list[str]:
        """Return a line, once, where the loss returns to near its first value."""
        loss = row.get("train_loss")
        if loss is None or self._degraded:
            return []
        if math.isnan(self._first):
            self._first = loss
        lowest, self._lowest = self._lowest, min(self._lowest, loss)
        self._degraded = loss > LOSS_RATIO * lowest and loss > FIRST_LOSS_RATIO * self._first
        if not self._degraded:
            return []
        return [
            f"the training loss went from {lowest:.3g} back to {loss:.3g} by round "
            f"{row['round']}, where the server step was {row['server_lr']:.2g}; bound it with "
            "server.max_step, raise server.eps, or lower local.lr"
        ]


def judge(rows: Sequence[Mapping[str, Any]], factor: float = 2.0) -> list[str]:
    """Return the lines for the first rounds of a run: at most one."""
    share = median(row["eps_share"] for row in rows)
    diversity = median(row["diversity"] for row in rows)
    always_clamped = all(row["clamped"] for row in rows)
    if diversity > factor and (share > DOMINATES or always_clamped):
        return [
            f"eps is {share:.0%} of the denominator of the step size in the first {len(rows)} "
            f"rounds, which would be {diversity / factor:.2g} without it; lower server.eps, or "
            "choose it with fedexp tune --epsilon"
        ]
    if always_clamped:
        return [
            f"the clients agree (diversity {diversity:.2g}, extrapolation needs more than "
            f"{factor:g}): the first {len(rows)} rounds were those of fedavg; a larger --cohort or "
            "more local.steps let them differ"
        ]
    return []
