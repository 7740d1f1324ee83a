"""A trial: a short run, and the score that it is judged by.

The paper runs 50 rounds and takes the training accuracy, averaged over the last 10 (App. D.3,
docs/paper.md#tuning-protocol). A task without accuracies is judged by its training loss, averaged
in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean, median
from typing import Any

from fedexp.engine import Record
from fedexp.engine.client_store import ClientStore
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from fedexp.runs.spec import Run, Spec, is_better_higher
from fedexp.tasks import Task

ROUNDS, WINDOW = 50, 10
EARLY_EVALUATIONS = 4  # before the window, for pruning

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrialResult:
    """The score of a trial and how it came about.

    Attributes:
        score: metric averaged over the window; the worst possible value if the trial diverged or
            was pruned.
        diverged_at: round in which it diverged, if it did.
        pruned: whether it was stopped early.
        test: test accuracy (or loss) after the last round, not used for selection; None without
            test data.
        step: median server step size.
        averages: whether every server step size was 1, that of FedAvg.
    """

    score: float
    diverged_at: int | None = None
    pruned: bool = False
    test: float | None = None
    step: float | None = None
    averages: bool = False


def metric_of(task: Task) -> str:
    """Return the name of the metric that trials of a task are judged by."""
    return "train_accuracy" if is_better_higher(task.metric) else "train_loss"


def worst_score(metric: str) -> float:
    """Return the score of a trial that diverged or was pruned."""
    return 0.0 if is_better_higher(metric) else math.inf


def score_of(rows: Sequence[Row], metric: str) -> float:
    """Return the metric averaged over the last `WINDOW` rounds, all of which are evaluated.

    >>> score_of([{"train_loss": float(k)} for k in range(20)], "train_loss")
    14.5
    """
    return mean(row[metric] for row in rows[-WINDOW:])


def window_of(rounds: int) -> tuple[int, int]:
    """Return the first and the last round of the window.

    >>> window_of(50)
    (41, 50)
    """
    return max(1, rounds - WINDOW + 1), rounds


def result_of(
    rows: Sequence[Row], metric: str, diverged_at: int | None = None, pruned: bool = False
) -> TrialResult:
    """Return the result of a trial with these rows."""
    failed = pruned or diverged_at is not None
    steps = [row["server_lr"] for row in rows if row["server_lr"] is not None]
    last = rows[-1] if rows else {}
    test = last.get("test_accuracy")
    return TrialResult(
        worst_score(metric) if failed else score_of(rows, metric),
        diverged_at,
        pruned,
        test=last.get("test_loss") if test is None else test,
        step=median(steps) if steps else None,
        averages=bool(steps) and all(step == 1 for step in steps),
    )


class TrialRun(Run):
    """A run that is evaluated a few times, and then in every round of the window."""

    def records(
        self,
        start: SimulationState | None = None,
        client_store: ClientStore | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Iterator[Record]:
        early = window_of(self.rounds)[0] - 1
        if (0 if start is None else start.round) < early:
            sparse = replace(self.spec, evaluate_every=max(1, early // EARLY_EVALUATIONS))
            before = replace(self, spec=sparse, rounds=early)
            for record in Run.records(before, start, client_store, process_group):
                yield record
                start = record.state
        window = replace(self, spec=replace(self.spec, evaluate_every=1))
        yield from Run.records(window, start, client_store, process_group)


def prepare_trial(spec: Spec, task: Task | None = None) -> TrialRun:
    """Return the run of a trial; `task` is the spec's own if it has been built before."""
    run = spec.prepare(task)
    return TrialRun(**{each.name: getattr(run, each.name) for each in fields(run)})
