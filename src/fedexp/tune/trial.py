"""A trial: one short run, and the one number that it is judged by.

The paper runs 50 rounds and takes the training accuracy, averaged over the last 10 (App. D.2). A
task without accuracies is judged by its training loss, averaged in the same way.

Trials over worker processes. The parent alone decides, and alone writes.

A worker trains one spec at a time. After every round it sends the row and waits for a word: go on,
or give up. So a search can prune, and knows nothing of workers. Other parents may be at work on the
same study; where they have all that is left, they are waited for.

Trials over the ranks of a job: whole trials where there are enough, else the clients of each.

Ranks share a study as any processes do, through its file. Where fewer trials are left than there
are ranks, the first rank alone decides, and all share the cohort of one trial after another.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from statistics import mean, median
from typing import Any, Protocol

import torch

from fedexp.distributed import DistributedGroup, Ranks
from fedexp.engine import Record
from fedexp.errors import DivergedError, FedExPError, NonFiniteUpdateWarning
from fedexp.runs.execute import deterministic, threads
from fedexp.runs.options import build_task, split_task_options
from fedexp.runs.pool import deaf_to_interrupts, end_with_parent
from fedexp.runs.spec import Run, Spec, is_better_higher
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
    process_group = DistributedGroup(ranks) if ranks is not None else None
    state = None
    if early:
        glances = replace(run.spec, evaluate_every=max(1, early // GLANCES))
        for record in replace(run, spec=glances, rounds=early).records(process_group=process_group):
            yield record
            state = record.state
    often = replace(run, spec=replace(run.spec, evaluate_every=1))
    yield from often.records(state, process_group=process_group)


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


MOMENT = 0.3  # seconds
Pause = Callable[[], None]
Train = Callable[[Spec, Callable[[Row], bool]], Scored]


def wait_a_moment() -> None:
    """Let others get on."""
    time.sleep(MOMENT)


class Search(Protocol):
    """What decides which trials are run; `key` is its own name for a trial."""

    def take(self) -> tuple[Any, Spec] | None:
        """The next trial, or None where there is none to begin at the moment."""

    def over(self) -> bool:
        """Whether no trial is left, neither to begin nor at work anywhere."""

    def go_on(self, key: Any, row: Row) -> bool:
        """Whether a trial is worth going on with."""

    def done(self, key: Any, scored: Scored) -> None:
        """A trial is over."""


def run_trials(
    search: Search, jobs: int, pause: Pause = wait_a_moment, train: Train = run_trial
) -> None:
    """Run trials until the search is over, `jobs` at a time, one thread each.

    Args:
        search: what decides which trials are run.
        jobs: how many at a time.
        pause: called again and again while other processes have all that is left.
        train: how a trial is run where there is one at a time.
    """
    if jobs > 1:
        _in_workers(search, jobs, pause)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteUpdateWarning)  # its effect is in the score
        while True:
            while job := search.take():
                key, spec = job
                search.done(key, train(spec, partial(search.go_on, key)))
            if search.over():
                return
            pause()


def _in_workers(search: Search, jobs: int, pause: Pause) -> None:
    with _started(jobs) as idle:
        busy: dict[Connection, Any] = {}
        while True:
            while idle and (job := search.take()):
                key, spec = job
                connection = idle.pop()
                connection.send(spec)
                busy[connection] = key
            if not busy:
                if search.over():
                    return
                pause()
                continue
            ready = wait(list(busy), MOMENT if idle else None)
            for connection in [each for each in busy if each in ready]:
                if _heard(connection, busy[connection], search):
                    del busy[connection]
                    idle.append(connection)


def _heard(connection: Connection, key: Any, search: Search) -> bool:
    """Take one message of a worker; whether its trial is over."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionError):
        raise FedExPError("a worker process died, perhaps of memory; try --jobs 1") from None
    if isinstance(message, BaseException):
        raise message
    if isinstance(message, Scored):
        search.done(key, message)
        return True
    connection.send(search.go_on(key, message))
    return False


@contextmanager
def _started(jobs: int) -> Iterator[list[Connection]]:
    """Worker processes, by their connections; they end with the block."""
    context = multiprocessing.get_context("spawn")
    connections, workers = [], []
    try:
        with deaf_to_interrupts():
            for _ in range(jobs):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_serve, args=(theirs,), daemon=True)
                worker.start()
                theirs.close()  # so that its end is seen here, and ours there
                connections.append(ours)
                workers.append(worker)
        yield list(connections)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for connection in connections:
            connection.close()


def _serve(connection: Connection) -> None:
    """The life of a worker: spec after spec, until its parent ends."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def go_on(row: Row) -> bool:
        connection.send(row)
        return bool(connection.recv())

    with suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            spec = connection.recv()
            try:
                answer: Scored | Exception = run_trial(spec, go_on)
            except Exception as error:
                answer = error
            connection.send(answer)


def run_left(search: Search, left: int, jobs: int, pause: Pause, ranks: Ranks | None) -> None:
    """Run the trials that are left, as many as that at the same time as can be.

    Args:
        search: what decides which trials are run; each rank has its own of the same study.
        left: how many there are, the same number on all ranks.
        jobs: trials at a time where there are no ranks.
        pause: called again and again while other processes have all that is left.
        ranks: the processes that all call this, if there are several.
    """
    if ranks is None:
        run_trials(search, min(jobs, left), pause)
    elif left >= ranks.world_size:
        run_trials(search, 1, pause)
    elif ranks.is_first:
        run_trials(search, 1, pause, partial(_lead, ranks))
        ranks.broadcast(None)
    else:
        _follow(ranks)


def _lead(ranks: Ranks, spec: Spec, go_on: Callable[[Row], bool]) -> Scored:
    """A trial with all ranks; they hear which one, and after every round whether it goes on."""
    ranks.broadcast(spec)
    return run_trial(spec, lambda row: ranks.broadcast(go_on(row)), ranks)


def _follow(ranks: Ranks) -> None:
    while (spec := ranks.receive()) is not None:
        run_trial(spec, lambda row: bool(ranks.receive()), ranks)
