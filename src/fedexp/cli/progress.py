"""What a run prints on stderr while it trains: a progress bar or lines for a log, and diagnostics.

Diagnostics are a line for the user when extrapolation has no effect, or does harm. No effect: eps
prevents it, or the clients agree. Both are judged once, over the first rounds. A large share of eps
in the denominator of the step size is not a fault by itself: it bounds the step where clients
disagree most, and towards the end of training the mean update vanishes. Harm: the training loss has
doubled, and is back near its first value.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

from fedexp.experiment import Row

SHOWN = {  # the numbers beside the bar: of each, the first name that a row has
    ("train_loss",): "loss {:.3g}",
    ("test_accuracy", "train_accuracy"): "accuracy {:.2%}",
    ("server_lr",): "step {:.3g}",
}

LINES = 20  # of a log, per run
FIRST_ROUNDS = 20  # cohorts differ from round to round, so a few do not suffice
# Fraction of these rounds in which the step would be above 1 without eps and is not with it. In the
# runs of results/ it is 0.05 to 0.15 on EMNIST with participants x eps, which has half of the
# denominator there and needs half of FedAvg's rounds, and 0.55 to 0.6 on CIFAR-10 in mode
# authors-code, which needs more rounds than mode paper. The share of eps does not tell these apart.
PREVENTED = 0.5
# The training loss relative to its lowest so far. In the runs of results/ it stays below 1.9 where
# FedExP learns images, and is 2.4 or more where SCAFFOLD-ExP degrades to chance. It is 2.2 with
# FedExP-M, and 2.7 on least squares, far below the first loss: there it only oscillates.
LOSS_RATIO = 2.0
FIRST_LOSS_RATIO = 0.5  # relative to the first loss


class Bar(Protocol):
    """Called with every row, and with the name of its run where several train at a time."""

    def __call__(self, row: Row, name: str = "") -> None: ...

    def skip(self, rounds: int) -> None:
        """Skip rounds that were done before; they do not enter the estimate of the time left."""


@contextmanager
def watch(
    title: str, rounds: int, runs: int = 1, quiet: bool = False, metric: str = ""
) -> Iterator[Bar]:
    """Show a bar over all rounds of all runs, or print lines if `quiet`.

    Before the first round the bar shows what is being waited for. Where stderr is not a terminal it
    is not drawn.

    Args:
        title: of the bar.
        rounds: of each run.
        runs: how many.
        quiet: print lines.
        metric: of the task's goal, shown besides loss and accuracy.
    """
    if quiet:
        yield LogLines(rounds, metric)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        bar, log = LiveBar(p, title, rounds * runs, metric), logging.getLogger("fedexp")
        level = log.level
        log.addHandler(bar)
        log.setLevel(logging.INFO)
        try:
            yield bar
        finally:
            log.removeHandler(bar)
            log.setLevel(level)


def describe(row: dict[str, Any], metric: str = "") -> str:
    """Return the main numbers of a row as text.

    >>> describe({"round": 3, "train_loss": 0.25, "server_lr": 1.5, "test_f1": 0.9}, "test_f1")
    'test f1 0.9  loss 0.25  step 1.5'
    """
    values = {name: value for name, value in row.items() if value is not None}
    first = ((next((n for n in names if n in values), None), text) for names, text in SHOWN.items())
    shown = [text.format(values[name]) for name, text in first if name]
    if metric in values and not metric.endswith(("loss", "accuracy")):
        shown.insert(0, f"{metric.replace('_', ' ')} {values[metric]:.4g}")
    return "  ".join(shown)


class LogLines:
    """Prints about twenty lines per run, and one for its last round."""

    def __init__(self, rounds: int, metric: str = "") -> None:
        self._rounds, self._every, self._metric = rounds, max(1, rounds // LINES), metric
        self._latest: dict[str, Row] = {}

    def __call__(self, row: Row, name: str = "") -> None:
        latest = _updated(self._latest.setdefault(name, {}), row)
        if row["round"] % self._every == 0 or row["round"] == self._rounds:
            head = f"{name} " if name else ""
            line = f"{head}round {row['round']}/{self._rounds}  {describe(latest, self._metric)}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def skip(self, rounds: int) -> None:
        """Do nothing: lines have no estimate."""


class LiveBar(logging.Handler):
    """A progress bar of rich, one task for all runs; until the first round it shows messages."""

    def __init__(self, progress: Any, title: str, total: int, metric: str = "") -> None:
        super().__init__(logging.INFO)
        self._progress, self._latest, self._metric = progress, dict[str, Any](), metric
        self._task = progress.add_task(title, total=total, numbers="")

    def __call__(self, row: Row, name: str = "") -> None:
        numbers = describe(_updated(self._latest, row), self._metric)
        self._progress.update(self._task, advance=1, numbers=numbers)

    def emit(self, record: logging.LogRecord) -> None:
        """Show what is being waited for."""
        if not self._latest:
            self._progress.update(self._task, numbers=f"{record.getMessage()} ...")

    def skip(self, rounds: int) -> None:
        self._progress.update(self._task, completed=rounds)


def _updated(latest: Row, row: Row) -> Row:
    """Merge a row: rounds between evaluations have no loss, so the last one stays."""
    latest.update({name: value for name, value in row.items() if value is not None})
    return latest


class Diagnostics:
    """Judges the rows of a run in order, those before it was resumed included.

    Only rules that extrapolate report `eps_share` and `diversity`; others have no diagnostics.

    Args:
        options: the resolved options of the run, by dotted name.

    >>> diagnostics = Diagnostics({"server.factor": 2.0})
    >>> row = {"eps_share": 0.9, "diversity": 6.0, "clamped": 1.0}
    >>> [line for _ in range(30) for line in diagnostics.see(row)]
    ['eps prevents extrapolation in 20 of the first 20 rounds: it is 90% of the denominator ...']
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factor = float(options.get("server.factor", 2.0))
        self._relative = options.get("server.eps_mode") == "relative"
        self._rows: list[Mapping[str, Any]] = []
        self._first, self._lowest, self._degraded = math.nan, math.inf, False

    def see(self, row: Mapping[str, Any]) -> list[str]:
        """Return the lines for this round: mostly none, and none twice."""
        if row.get("eps_share") is None or row.get("diversity") is None:
            return []
        lines = self._judge_loss(row)
        if len(self._rows) < FIRST_ROUNDS:
            self._rows.append(row)
            if len(self._rows) == FIRST_ROUNDS:
                lines += judge(self._rows, self._factor, self._relative)
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
        raised = "raise server.eps" + " (with server.eps_mode=relative)" * self._relative
        return [
            f"the training loss went from {lowest:.3g} back to {loss:.3g} by round "
            f"{row['round']}, where the server step was {row['server_lr']:.2g}; bound it with "
            f"server.max_step, {raised}, or lower local.lr"
        ]


def judge(
    rows: Sequence[Mapping[str, Any]], factor: float = 2.0, relative: bool = False
) -> list[str]:
    """Return the lines for the first rounds of a run: at most one.

    Args:
        rows: of the first rounds.
        factor: of the rule; without eps it extrapolates where the diversity is larger.
        relative: whether eps is relative to the mean squared norm.
    """
    share = median(row["eps_share"] for row in rows)
    diversity = median(row["diversity"] for row in rows)
    prevented = [
        row["diversity"] > factor >= row["diversity"] * (1 - row["eps_share"]) for row in rows
    ]
    if sum(prevented) > PREVENTED * len(rows):
        remedy = (
            "lower server.eps (with server.eps_mode=relative)"
            if relative
            else "lower server.eps, choose it with fedexp tune --epsilon, or set "
            "server.eps_mode=relative and server.eps=0.05, which suits most tasks"
        )
        return [
            f"eps prevents extrapolation in {sum(prevented)} of the first {len(rows)} rounds: it "
            f"is {share:.0%} of the denominator of the step size, which would be "
            f"{diversity / factor:.2g} without it; {remedy}"
        ]
    if all(row["clamped"] for row in rows):
        return [
            f"the clients agree (diversity {diversity:.2g}, extrapolation needs more than "
            f"{factor:g}): the first {len(rows)} rounds were those of fedavg; a larger --cohort or "
            "more local.steps let them differ"
        ]
    return []
