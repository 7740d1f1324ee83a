"""Many runs: in worker processes, over the ranks of a torchrun job, or one share per array job.

`run_all` executes a list of experiments and returns their outcomes. `run_queue` executes runs that
a `RunQueue` hands out one at a time and may stop early: trials of `fedexp.tuning` are such runs.
Both call `execute` for every run, in one of three ways:

- in this process, one run after another;
- in worker processes, one thread each. A worker sends every row and the result over a pipe, and
  looks there for a request to stop after every round. Only the parent decides which runs to start
  and to stop;
- over ranks: whole runs on each rank if there are at least as many runs as ranks. Otherwise the
  runs are executed one after another and all ranks share the clients of each.

Ctrl-C and SIGTERM reach the parent alone, which passes them on as a request to stop. Workers are
killed when the parent stops using them, and exit by themselves if it is killed.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedexp.distributed import RankLostError, Ranks
from fedexp.errors import OtherContentError, UsageError
from fedexp.experiment import CHECKPOINT_EVERY, Experiment, Row, TaskKey
from fedexp.plain import id_stem
from fedexp.runs.execute import stored_outcome
from fedexp.runs.folder import RESULT, RunWarning
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.spec import TRIALS, OnRound, Outcome, folder_of
from fedexp.runs.workers import (
    RETRY,
    Execution,
    Executor,
    Job,
    Result,
    RunQueue,
    Stop,
    run_in_workers,
)

T = TypeVar("T")


def run_all(
    experiments: Sequence[Experiment],
    jobs: int = 1,
    on_round: OnRound = lambda experiment, row: None,
    root: Path | None = None,
    *,
    ranks: Ranks | None = None,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: Stop = lambda: False,
    on_busy: Callable[[Experiment], None] | None = None,
    restart: bool = False,
) -> list[Outcome]:
    """Execute the runs and return their outcomes, in the order of the experiments.

    Runs of one task are executed one after another, and share what they prepare (`Executor`). A run
    that fails ends all others at once.

    Args:
        experiments: the runs.
        jobs: runs at a time, each in a process with one thread if there are several.
        on_round: called with every row. With ranks, only with rows of new rounds, and only on the
            rank that executes the run (the first if they share it).
        root: folder of all runs: finished runs are returned, interrupted ones resume. None stores
            nothing.
        ranks: the ranks of a job, which all call this function and get all outcomes; `jobs` is not
            used then.
        checkpoint_every: seconds between checkpoints.
        stop: called after every round; True stops all runs after their round and raises
            `RunInterrupted`.
        on_busy: called with a run that another process is executing, which is left out of the
            outcomes; None raises `BusyError`.
        restart: discard what is stored of the runs.
    """
    done: dict[int, Outcome] = {}
    if root is not None and not restart:
        if ranks is None:
            done = dict(stored_outcomes(experiments, root, on_round))
        else:
            done = ranks.compute_on_first(lambda: dict(stored_outcomes(experiments, root)))
    waiting = [Job(k, run) for k, run in enumerate(experiments) if k not in done]
    jobs = jobs_for(experiments, jobs)
    share = waiting
    if ranks is not None and len(waiting) >= ranks.world_size:
        share = Shard(ranks.rank + 1, ranks.world_size).of(waiting)
    listed = _ListQueue(_by_task(share), on_round, on_busy)
    how = Execution(root, checkpoint_every, restart, on_busy is not None)
    run_queue(listed, len(waiting), jobs, how, ranks=ranks, stop=stop)
    done |= listed.outcomes
    if ranks is not None:
        with _stopped_if_lost(stop):
            ranks.barrier()  # a rank may have to wait long for the last run
        for outcomes in ranks.all_gather_object(listed.outcomes):
            done |= outcomes
    return [done[k] for k in sorted(done)]


def jobs_for(experiments: Sequence[Experiment], jobs: int) -> int:
    """Return how many runs to execute at a time: one if workers cannot import what they need."""
    if jobs == 1:
        return 1
    what = next((what for run in experiments if (what := run.session_object)), None)
    if what is None:
        return jobs
    warnings.warn(
        f"{what} was made in this session, so that other processes cannot import it: all runs are "
        "executed in this process; define it in a file to use jobs",
        RunWarning,
        stacklevel=3,
    )
    return 1


def _by_task(jobs: Sequence[Job]) -> list[Job]:
    """Return the runs with those of a task together, the tasks in the order of their first runs."""
    keys: list[TaskKey | None] = []
    for job in jobs:
        try:
            keys.append(job.experiment.task_key)
        except UsageError:  # reported by the run itself
            keys.append(None)
    order = sorted(range(len(jobs)), key=lambda k: keys.index(keys[k]))
    return [jobs[k] for k in order]


class _ListQueue:
    """A list of runs; collects their outcomes."""

    def __init__(
        self, jobs: Sequence[Job], on_round: OnRound, on_busy: Callable[[Experiment], None] | None
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._left, self._on_round, self._on_busy = list(jobs), on_round, on_busy

    @property
    def references(self) -> list[str]:
        return [reference for job in self._left for reference in job.experiment.references]

    def take(self) -> Job | None:
        return self._left.pop(0) if self._left else None

    def is_done(self) -> bool:
        return not self._left

    def on_round(self, job: Job, row: Row) -> bool:
        self._on_round(job.experiment, row)
        return True

    def on_result(self, job: Job, result: Result) -> None:
        if isinstance(result, Outcome):
            self.outcomes[job.key] = result
        elif self._on_busy is not None:
            self._on_busy(job.experiment)


def stored_outcomes(
    experiments: Sequence[Experiment],
    root: Path,
    on_round: OnRound = lambda experiment, row: None,
    skip_others: bool = False,
) -> Iterator[tuple[int, Outcome]]:
    """Yield the position and the outcome of every run that is finished; start no process.

    A run's id and fingerprint depend on its task, which is built once for all that share it. A
    stored run of other data, model or code is an error, or left out if `skip_others`.
    """
    last = None  # keeps the task for the next
    for k in sorted(range(len(experiments)), key=lambda k: experiments[k].seed):
        run, names = experiments[k], experiments[k].names
        pattern = f"{id_stem(names.task, names.algorithm, run.seed)}-*/{RESULT}"
        if not any(any(folder.glob(pattern)) for folder in (root, root / TRIALS)):
            continue
        last = run.sharing(last)
        try:
            outcome = stored_outcome(last, folder_of(last, root))
        except OtherContentError:
            if not skip_others:
                raise
            outcome = None
        if outcome is not None:
            for row in outcome.rows:
                on_round(run, row)
            yield k, outcome


@dataclass(frozen=True)
class Shard:
    """One share of a list of runs, for one job of an array.

    A share depends only on the order of the runs, so jobs need not communicate.

    Args:
        index: which share, from 1 to `count`.
        count: number of shares.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, items: Sequence[T]) -> list[T]:
        """Return every `count`-th item.

        Neighbours in a list of runs cost about the same (the seeds of an algorithm, the algorithms
        of a task), so all shares get equally many of each kind, up to one.

        >>> Shard(2, 3).of("abcdefgh")
        ['b', 'e', 'h']
        """
        return list(items[self.index - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """Return the shard of a text.

    >>> parse_shard("2/4")
    Shard(index=2, count=4)
    """
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    shard = Shard(int(match[1]), int(match[2])) if match else None
    if shard is None or not 1 <= shard.index <= shard.count:
        raise UsageError(
            f"--shard takes i/n with i from 1 to n, e.g. 2/4, not {text!r}; count a job array from "
            "1 (--array=1-4)"
        )
    return shard


def runs_per_rank(runs: int, ranks: Ranks | None) -> int:
    """Return how many runs one rank reports at most: its share, or all that ranks share.

    >>> runs_per_rank(10, None)
    10
    """
    if ranks is None or runs < ranks.world_size:
        return runs
    return math.ceil(runs / ranks.world_size)


def run_queue(
    queue: RunQueue,
    left: int,
    jobs: int,
    how: Execution,
    *,
    ranks: Ranks | None = None,
    stop: Stop = lambda: False,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Execute runs until the queue is done.

    Args:
        queue: hands out the runs and receives their rows and results.
        left: number of runs to execute, the same on all ranks: decides how they are spread.
        jobs: runs at a time, each in a process with one thread if there are several.
        how: options of every run.
        ranks: the ranks of a job, which all call this function, each with a queue of its own; only
            the first rank's is used if there are fewer runs than ranks. `jobs` is not used.
        stop: called after every round; True stops all runs after their round and raises
            `RunInterrupted` unless nothing was left to do.
        on_wait: called when the queue is not done but all its runs are with other processes.
    """
    if ranks is None and min(jobs, left) > 1:
        changed = run_in_workers(queue, min(jobs, left), how, stop, on_wait)
        if changed is None:
            return
        warnings.warn(
            f"{changed} differs in worker processes, which import its file: all runs are executed "
            "in this process; define it, and what it reads, at the top level of the file, not "
            'under if __name__ == "__main__":, to use jobs',
            RunWarning,
            stacklevel=3,
        )
    with closing(Executor(how)) as run:
        if ranks is not None and left < ranks.world_size:
            _on_all_ranks(queue, run, ranks, stop, on_wait)
        else:
            _in_this_process(queue, run, stop, on_wait)


def _in_this_process(
    queue: RunQueue, run: Callable[..., Result], stop: Stop, on_wait: Callable[[], None]
) -> None:
    while True:
        stopping = stop()
        if not stopping and (job := queue.take()):
            queue.on_result(job, run(job.experiment, partial(queue.on_round, job), stop))
        elif queue.is_done():
            return
        elif stopping:
            raise RunInterrupted(None, 0)
        else:
            on_wait()
            time.sleep(RETRY)


STOPPED = "stopped"  # what the first rank broadcasts instead of the next run


def _on_all_ranks(
    queue: RunQueue, run: Executor, ranks: Ranks, stop: Stop, on_wait: Callable[[], None]
) -> None:
    """Execute one run after another on all ranks; the first broadcasts every run, and the end.

    A run that is stopped stops on all ranks after the same round (`execute`), and the others learn
    from the next message whether all runs stop or only this one.
    """

    def lead(experiment: Experiment, on_round: Callable[[Row], bool], stop: Stop) -> Result:
        ranks.broadcast(experiment.portable)
        return run(experiment, on_round, stop, ranks)

    if ranks.is_first:
        try:
            _in_this_process(queue, lead, stop, on_wait)
        except RunInterrupted:
            with suppress(RankLostError):
                ranks.broadcast(STOPPED)
            raise
        ranks.broadcast(None)
        return
    while True:
        with _stopped_if_lost(stop):
            experiment = ranks.receive()
        if experiment is None:
            return
        if experiment == STOPPED:
            raise RunInterrupted(None, 0)
        with suppress(RunInterrupted):
            run(experiment, lambda row: True, stop, ranks)


@contextmanager
def _stopped_if_lost(stop: Stop) -> Iterator[None]:
    """Raise `RunInterrupted`, not `RankLostError`, if this rank is to stop as the others did."""
    try:
        yield
    except RankLostError:
        if stop():
            raise RunInterrupted(None, 0) from None
        raise
