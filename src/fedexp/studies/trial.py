"""A trial: one short run, and the one number that it is judged by.

The paper runs 50 rounds and takes the training accuracy, averaged over the last 10 (App. D.2). A
task without accuracies is judged by its training loss, averaged in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean, median
from typing import Any

import torch

from fedexp.distributed import Ranks, Shared
from fedexp.engine import Record
from fedexp.errors import DivergedError
from fedexp.experiments.catalog import build_task
from fedexp.experiments.setup import split_task_options
from fedexp.experiments.spec import Run, Spec, is_better_higher
from fedexp.runs.determinism import deterministic, threads
from fedexp.tasks import Task

ROUNDS, WINDOW = 50, 10
GLANCES = 4  # evaluations before the window, for whoever wants to give up on a trial early

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Scored:
    """What came out of a trial.

    Attributes:
        score: the metric averaged over the window; the worst there is where the trial diverged.
        diverged_at: the round where it did.
        pruned: whether it was given up before its end.
        test: test accuracy (or loss) after the last round, which decides nothing; None without.
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
    """What trials of a task are judged by."""
    return "train_accuracy" if is_better_higher(task.metric) else "train_loss"


def worst(metric: str) -> float:
    """The score of a trial that diverged."""
    return 0.0 if is_better_higher(metric) else math.inf


def score_of(rows: Sequence[Row], metric: str) -> float:
    """The metric averaged over the last `WINDOW` rounds, all of them evaluated.

    >>> score_of([{"train_loss": float(k)} for k in range(20)], "train_loss")
    14.5
    """
    values = [row[metric] for row in rows[-WINDOW:]]
    return mean(values)


def window_of(rounds: int) -> tuple[int, int]:
    """The first and the last round that count."""
    return max(1, rounds - WINDOW + 1), rounds


def run_trial(spec: Spec, go_on: Callable[[Row], bool], ranks: Ranks | None = None) -> Scored:
    """Train as the spec says and score it; `go_on` sees every row and may end the trial early.

    Where `ranks` share the work, all of them call this and must agree on when to end.
    """
    run = spec.prepare(_task(spec))
    metric = metric_of(run.task)
    rows: list[Row] = []
    number = 1 if run.is_small else torch.get_num_threads()
    with deterministic(spec.deterministic), threads(number):
        try:
            for record in _records(run, ranks):
                rows.append(record.to_json())
                if not go_on(rows[-1]):
                    return _scored(rows, worst(metric), pruned=True)
        except DivergedError as error:
            return _scored(rows, worst(metric), diverged_at=error.round)
    return _scored(rows, score_of(rows, metric))


def _records(run: Run, ranks: Ranks | None) -> Iterator[Record]:
    """The rounds of a run, evaluated now and then, and in every round of the window."""
    early = window_of(run.rounds)[0] - 1
    sharing = Shared(ranks) if ranks is not None else None
    state = None
    if early:
        glances = replace(run.spec, evaluate_every=max(1, early // GLANCES))
        for record in replace(run, spec=glances, rounds=early).records(sharing=sharing):
            yield record
            state = record.state
    often = replace(run, spec=replace(run.spec, evaluate_every=1))
    yield from often.records(state, sharing=sharing)


def _scored(rows: Sequence[Row], score: float, **how: Any) -> Scored:
    steps = [row["server_lr"] for row in rows if row["server_lr"] is not None]
    last = rows[-1] if rows else {}
    test = last.get("test_accuracy")
    return Scored(
        score,
        test=last.get("test_loss") if test is None else test,
        step=median(steps) if steps else None,
        averages=bool(steps) and all(step == 1 for step in steps),
        **how,
    )


def _task(spec: Spec) -> Task:
    of_task, _ = split_task_options(dict(spec.options))
    return _built(spec.task, tuple(of_task.items()), spec.seed, spec.mode)


@lru_cache(maxsize=1)
def _built(name: str, options: tuple[tuple[str, str], ...], seed: int, mode: str) -> Task:
    """Trials of a study share their task, so a process builds it once."""
    return build_task(name, dict(options), seed, mode)
