"""A line of advice when extrapolation has nothing to do, or has overdone it.

Nothing to do: eps outweighs the clients, or they agree. Both are judged once, over the first
rounds. Later a large share of eps is no fault: towards the end of training the mean update
vanishes, and eps is there to hold the step size then. Overdone: the training loss has doubled, and
is back near where it began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

STRETCH = 20  # rounds: cohorts differ from round to round, so a few say little
# From here on eps is larger than ||mean||² itself, and η_g less than half of what the clients call
# for. Measured with the values that tasks come with, the median is 0.14 on digits, 0.01 on
# digits-mlp and 0.03 on EMNIST; with eps = 1, nearly FedAvg on digits, it is 0.7.
DOMINATES = 0.5
# The training loss over its lowest so far. In the runs of results/ it stays below 1.9 where FedExP
# learns images, and is 2.4 or more where SCAFFOLD-ExP falls back to guessing. With FedExP-M it is
# 2.2, and 2.7 on least squares, far below the first loss, where nothing is lost: it oscillates.
FALLEN = 2.0
BACK = 0.5  # of the first loss


class Advice:
    """Sees the rows of a run in order, those of before it was resumed as well.

    Only rules that extrapolate report `eps_share` and `diversity`; there is no advice on others.

    Args:
        options: the resolved options of the run, by dotted name.

    >>> advice = Advice({"server.factor": 2.0})
    >>> row = {"eps_share": 0.9, "diversity": 6.0, "clamped": 1.0}
    >>> [line for _ in range(30) for line in advice.see(row)]
    ['eps is 90% of the denominator of the step size ...']
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factor = float(options.get("server.factor", 2.0))
        self._rows: list[Mapping[str, Any]] = []
        self._first, self._lowest, self._fallen = math.nan, math.inf, False

    def see(self, row: Mapping[str, Any]) -> list[str]:
        """What there is to say after this round: mostly nothing, and nothing twice."""
        if row.get("eps_share") is None or row.get("diversity") is None:
            return []
        lines = self._on_loss(row)
        if len(self._rows) < STRETCH:
            self._rows.append(row)
            lines += judge(self._rows, self._factor) if len(self._rows) == STRETCH else []
        return lines

    def _on_loss(self, row: Mapping[str, Any]) -> list[str]:
        """Whether all that was learnt is being lost, told once."""
        loss = row.get("train_loss")
        if loss is None or self._fallen:
            return []
        if math.isnan(self._first):
            self._first = loss
        lowest, self._lowest = self._lowest, min(self._lowest, loss)
        self._fallen = loss > FALLEN * lowest and loss > BACK * self._first
        return [_fallen_line(row, lowest)] if self._fallen else []


def judge(rows: Sequence[Mapping[str, Any]], factor: float = 2.0) -> list[str]:
    """The lines that the first rounds of a run deserve."""
    share = median(row["eps_share"] for row in rows)
    diversity = median(row["diversity"] for row in rows)
    always_clamped = all(row["clamped"] for row in rows)
    if diversity > factor and (share > DOMINATES or always_clamped):
        return [_eps_line(share, diversity, factor, len(rows))]
    return [_agree_line(diversity, factor, len(rows))] if always_clamped else []


def _eps_line(share: float, diversity: float, factor: float, rounds: int) -> str:
    return (
        f"eps is {share:.0%} of the denominator of the step size in the first {rounds} rounds, "
        f"which would be {diversity / factor:.2g} without it; lower server.eps, or choose it with "
        "fedexp tune --epsilon"
    )


def _fallen_line(row: Mapping[str, Any], lowest: float) -> str:
    return (
        f"the training loss went from {lowest:.3g} back to {row['train_loss']:.3g} by round "
        f"{row['round']}, where the server step was {row['server_lr']:.2g}; bound it with "
        "server.max_step, raise server.eps, or lower local.lr"
    )


def _agree_line(diversity: float, factor: float, rounds: int) -> str:
    return (
        f"the clients agree (diversity {diversity:.2g}, extrapolation needs more than {factor:g}): "
        f"the first {rounds} rounds were those of fedavg; a larger --cohort or more local.steps "
        "let them differ"
    )
