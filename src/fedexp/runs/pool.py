"""Many runs: in worker processes, over the ranks of a torchrun job, or one share per array job.

`run_all` executes a list of specs and returns their outcomes. `run_queue` executes runs that a
`RunQueue` hands out one at a time and may stop early: trials of `fedexp.tuning` are such runs.
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
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import torch

from fedexp.distributed import RankLostError, Ranks
from fedexp.errors import FedExPError, UsageError
from fedexp.options import build_task, split_task_options
from fedexp.references import in_session, load_object
from fedexp.runs.execute import execute, stored_outcome
from fedexp.runs.files import Row
from fedexp.runs.fingerprint import Digest, data_digests
from fedexp.runs.folder import RESULT, BusyError, OtherContentError, RunWarning
from fedexp.runs.journal import CHECKPOINT_EVERY, RunInterrupted
from fedexp.runs.spec import OnRound, Outcome, Run, Spec, folder_of, id_stem
from fedexp.tasks import Task

POLL = 0.1  # seconds between looks at the request to stop while workers are silent
RETRY = 0.3  # seconds before the next call of `take` on a queue that had no run to start

T = TypeVar("T")
Stop = Callable[[], bool]
Result = Outcome | Literal["busy", "stopped"]


@dataclass(frozen=True)
class Job:
    """A run to execute, and the name that its queue gave it."""

    key: Any
    spec: Spec


class RunQueue(Protocol):
    """Runs to execute, handed out one at a time; used by one process only."""

    def take(self) -> Job | None:
        """Return the next run, or None if none can start at the moment."""

    def is_done(self) -> bool:
        """Return whether no run is left to start, and none that another process executes."""

    def on_round(self, job: Job, row: Row) -> bool:
        """Handle the row of a round; return False to stop the run, which ends its rows."""

    def on_result(self, job: Job, result: Result) -> None:
        """Handle the end of a run: "stopped" if `on_round` returned False, "busy" if skipped."""


@dataclass(frozen=True)
class Execution:
    """How the runs of a queue are executed.

    Attributes:
        prepare: makes a run from a spec and its task; a function that can be pickled.
        root: folder of all runs; None stores nothing.
        checkpoint_every: seconds between checkpoints.
        restart: discard what is stored of the runs.
        skip_busy: skip a run that another process is executing instead of raising.
        data: digests of the data of the user's own tasks by reference, which those that a worker
            imports must have.
    """

    prepare: Callable[[Spec, Task], Run] = Spec.prepare
    root: Path | None = None
    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    skip_busy: bool = False
    data: Mapping[str, Mapping[str, Digest]] = field(default_factory=dict)


def run_all(
    specs: Sequence[Spec],
    jobs: int,
    on_round: OnRound,
    root: Path | None = None,
    *,
    ranks: Ranks | None = None,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: Stop = lambda: False,
    on_busy: Callable[[Spec], None] | None = None,
    restart: bool = False,
) -> list[Outcome]:
    """Execute the specs and return their outcomes, in the order of the specs.

    A run that fails ends all others at once.

    Args:
        specs: the runs.
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
        restart: discard what is stored of the specs.
    """
    done: dict[int, Outcome] = {}
    if root is not None and not restart:
        if ranks is None:
            done = dict(stored_outcomes(specs, root, on_round))
        else:
            done = ranks.compute_on_first(lambda: dict(stored_outcomes(specs, root)))
    waiting = [Job(k, spec) for k, spec in enumerate(specs) if k not in done]
    own = waiting
    if ranks is not None and len(waiting) >= ranks.world_size:
        own = Shard(ranks.rank + 1, ranks.world_size).of(waiting)
    listed = _ListQueue(own, on_round, on_busy)
    how = Execution(Spec.prepare, root, checkpoint_every, restart, on_busy is not None)
    jobs = jobs_for(specs, jobs)
    sources = {job.spec.task_source for job in waiting}
    run_queue(listed, len(waiting), jobs, how, ranks=ranks, stop=stop, sources=sources)
    done |= listed.outcomes
    if ranks is not None:
        with _stopped_if_lost(stop):
            ranks.barrier()  # a rank may have to wait long for the last run
        for outcomes in ranks.all_gather_object(listed.outcomes):
            done |= outcomes
    return [done[k] for k in sorted(done)]


def jobs_for(specs: Sequence[Spec], jobs: int) -> int:
    """Return how many runs to execute at a time: one if workers cannot import what they need."""
    own = next((spec for spec in specs if spec.in_session), None)
    if own is None or jobs == 1:
        return jobs
    what = f"task {own.task!r}" if in_session(own.task_source) else f"algorithm {own.algorithm!r}"
    warnings.warn(
        f"{what} was made in this session, so that other processes cannot import it: all runs are "
        "executed in this process; define it in a file to use jobs",
        RunWarning,
        stacklevel=3,
    )
    return 1


class _ListQueue:
    """A list of runs; collects their outcomes."""

    def __init__(
        self, jobs: Sequence[Job], on_round: OnRound, on_busy: Callable[[Spec], None] | None
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._left, self._on_round, self._on_busy = list(jobs), on_round, on_busy

    def take(self) -> Job | None:
        return self._left.pop(0) if self._left else None

    def is_done(self) -> bool:
        return not self._left

    def on_round(self, job: Job, row: Row) -> bool:
        self._on_round(job.spec, row)
        return True

    def on_result(self, job: Job, result: Result) -> None:
        if isinstance(result, Outcome):
            self.outcomes[job.key] = result
        elif self._on_busy is not None:
            self._on_busy(job.spec)


def stored_outcomes(
    specs: Sequence[Spec],
    root: Path,
    on_round: OnRound = lambda spec, row: None,
    skip_others: bool = False,
) -> Iterator[tuple[int, Outcome]]:
    """Yield the position and the outcome of every spec whose run is finished; start no process.

    A run's id and fingerprint depend on its task, which is built once for all that share it. A
    stored run of other data, model or code is an error, or left out if `skip_others`.
    """
    prepare = _SharedTask(Spec.prepare)
    for k in sorted(range(len(specs)), key=lambda k: specs[k].seed):
        spec = specs[k]
        if not any(root.glob(f"{id_stem(spec.task, spec.algorithm, spec.seed)}-*/{RESULT}")):
            continue
        run = prepare(spec)
        try:
            outcome = stored_outcome(run, folder_of(run, root))
        except OtherContentError:
            if not skip_others:
                raise
            outcome = None
        if outcome is not None:
            for row in outcome.rows:
                on_round(spec, row)
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
    found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    shard = Shard(int(found[1]), int(found[2])) if found else None
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
    sources: Iterable[str | None] = (),
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
        sources: references to the user's own tasks among the runs; workers import them.
    """
    run = _Executor(how)
    if ranks is not None and left < ranks.world_size:
        _on_all_ranks(queue, run, ranks, stop, on_wait)
    elif ranks is None and min(jobs, left) > 1:
        how = replace(how, data=_digests_of(sources))
        _in_workers(queue, min(jobs, left), how, stop, on_wait)
    else:
        _in_this_process(queue, run, stop, on_wait)


def _digests_of(sources: Iterable[str | None]) -> dict[str, Mapping[str, Digest]]:
    """Digest the data of the user's own tasks; a function's task depends on its arguments."""
    tasks = {source: load_object(source) for source in sources if source is not None}
    return {s: data_digests(task) for s, task in tasks.items() if isinstance(task, Task)}


class _SharedTask:
    """Prepares specs; builds a task once for consecutive specs that share it."""

    def __init__(
        self,
        prepare: Callable[[Spec, Task], Run],
        data: Mapping[str, Mapping[str, Digest]] = MappingProxyType({}),
    ) -> None:
        self._prepare, self._data = prepare, data
        self._key: Any = None
        self._task: Task | None = None

    def __call__(self, spec: Spec) -> Run:
        of_task, _ = split_task_options(dict(spec.options))
        key = spec.task, spec.task_source, spec.seed, spec.mode, of_task
        if self._task is None or key != self._key:
            self._task = None  # before the next is built: data may fit in memory only once
            self._task = build_task(spec.task, of_task, spec.seed, spec.mode, spec.task_source)
            self._key = key
            wanted = self._data.get(spec.task_source or "")
            if wanted is not None and data_digests(self._task) != wanted:
                raise UsageError(
                    f"{spec.task_source} has other data in every process that imports it; fix its "
                    "random seed, e.g. torch.manual_seed(0) where the file begins"
                )
        return self._prepare(spec, self._task)


class _Executor:
    """Executes one spec after another in this process."""

    def __init__(self, how: Execution) -> None:
        self._how, self._prepare = how, _SharedTask(how.prepare, how.data)

    def __call__(
        self, spec: Spec, on_round: Callable[[Row], bool], stop: Stop, ranks: Ranks | None = None
    ) -> Result:
        """Return the result; raise `RunInterrupted` if `stop`, not `on_round`, ended the run."""
        how, wanted = self._how, True

        def handle(spec: Spec, row: Row) -> None:
            nonlocal wanted
            wanted = wanted and on_round(row)

        try:
            outcome = execute(
                spec,
                how.root,
                handle,
                run=self._prepare(spec),
                ranks=ranks,
                checkpoint_every=how.checkpoint_every,
                restart=how.restart,
                stop=lambda: not wanted or stop(),
            )
        except BusyError:
            if not how.skip_busy:
                raise
            return "busy"
        except RunInterrupted:
            if wanted:
                raise
        return replace(outcome, state=None) if wanted else "stopped"  # too large for a pipe


def _in_this_process(
    queue: RunQueue, run: Callable[..., Result], stop: Stop, on_wait: Callable[[], None]
) -> None:
    while True:
        stopping = stop()
        if not stopping and (job := queue.take()):
            queue.on_result(job, run(job.spec, partial(queue.on_round, job), stop))
        elif queue.is_done():
            return
        elif stopping:
            raise RunInterrupted(None, 0)
        else:
            on_wait()
            time.sleep(RETRY)


STOPPED = "stopped"  # what the first rank broadcasts instead of the next spec


def _on_all_ranks(
    queue: RunQueue, run: _Executor, ranks: Ranks, stop: Stop, on_wait: Callable[[], None]
) -> None:
    """Execute one run after another on all ranks; the first broadcasts every spec, and the end.

    A run that is stopped stops on all ranks after the same round (`execute`), and the others learn
    from the next message whether all runs stop or only this one.
    """

    def lead(spec: Spec, on_round: Callable[[Row], bool], stop: Stop) -> Result:
        ranks.broadcast(spec)
        return run(spec, on_round, stop, ranks)

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
            spec = ranks.receive()
        if spec is None:
            return
        if spec == STOPPED:
            raise RunInterrupted(None, 0)
        with suppress(RunInterrupted):
            run(spec, lambda row: True, stop, ranks)


@contextmanager
def _stopped_if_lost(stop: Stop) -> Iterator[None]:
    """Raise `RunInterrupted`, not `RankLostError`, if this rank is to stop as the others did."""
    try:
        yield
    except RankLostError:
        if stop():
            raise RunInterrupted(None, 0) from None
        raise


def _in_workers(
    queue: RunQueue, count: int, how: Execution, stop: Stop, on_wait: Callable[[], None]
) -> None:
    stopping = interrupted = False
    retry_at = 0.0
    with worker_processes(count, how) as workers:
        while True:
            stopping = stopping or stop()
            idle = [worker for worker in workers if worker.job is None]
            if stopping:
                for worker in workers:
                    worker.request_stop()
            elif idle and time.monotonic() >= retry_at:
                while idle and (job := queue.take()):
                    idle.pop(0).start(job)
                retry_at = time.monotonic() + RETRY
            running = [worker for worker in workers if worker.job is not None]
            if not running:
                if queue.is_done() and not interrupted:
                    return
                if stopping:
                    raise RunInterrupted(how.root, 0)
                on_wait()
                time.sleep(RETRY)
                continue
            ready = wait([worker.connection for worker in running], POLL)
            for worker in running:
                if worker.connection in ready and (end := worker.handle_message(queue)):
                    interrupted = interrupted or end == "interrupted"
                    retry_at = 0.0


@contextmanager
def worker_processes(count: int, how: Execution) -> Iterator[list[_Worker]]:
    """Start worker processes; kill them at the end of the block."""
    workers: list[_Worker] = []
    try:
        with interrupts_blocked():
            workers.extend(_Worker(how) for _ in range(count))
        yield workers
    finally:
        with interrupts_blocked():
            for worker in workers:
                worker.kill()  # workers ignore milder signals; a stored run loses nothing


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self, how: Execution) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, how), daemon=True)
        with _main_not_imported():
            self._process.start()
        theirs.close()  # so that either side notices the end of the other
        self.job: Job | None = None
        self._stop_sent = self._wanted = False

    def start(self, job: Job) -> None:
        self.job, self._stop_sent, self._wanted = job, False, True
        self._send(job.spec)

    def request_stop(self) -> None:
        """Ask the worker to stop its run after the round, once."""
        if self.job is not None and not self._stop_sent:
            self._stop_sent = True
            self._send(None)

    def handle_message(self, queue: RunQueue) -> Literal["done", "interrupted"] | None:
        """Receive one message and pass it to the queue; return how the run ended if it did."""
        assert self.job is not None
        try:
            kind, content, *more = self.connection.recv()
        except (EOFError, OSError):
            raise FedExPError("a worker process died, perhaps of memory; try --jobs 1") from None
        if kind == "error":
            if not isinstance(content, FedExPError):
                content.add_note(f"in a worker process:\n{more[0]}")
            raise content
        if kind == "warning":
            warnings.warn(content, stacklevel=2)
            return None
        if kind == "row":
            if self._wanted and not queue.on_round(self.job, content):
                self._wanted = False
                self.request_stop()
            return None
        job, self.job = self.job, None
        if content == "stopped" and self._wanted:
            return "interrupted"
        queue.on_result(job, content if self._wanted else "stopped")
        return "done"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _send(self, message: Spec | None) -> None:
        with suppress(OSError):  # the worker has died, which `handle_message` reports
            self.connection.send(message)


def _serve(connection: Connection, how: Execution) -> None:
    """Execute the specs that the parent sends, until it ends. None requests a stop."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    run, stopping, sending = _Executor(how), False, threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            connection.send(message)

    def on_round(row: Row) -> bool:
        send("row", row)
        return True

    def stop() -> bool:
        nonlocal stopping
        stopping = stopping or (connection.poll() and connection.recv() is None)
        return stopping

    warnings.simplefilter("ignore")  # dropped clients are counted in the rows
    warnings.simplefilter("always", RunWarning)
    warnings.showwarning = lambda message, *args, **more: send("warning", message)
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            spec = connection.recv()
            if spec is None:  # a request that arrived after the end of its run
                continue
            stopping = False
            try:
                send("result", run(spec, on_round, stop))
            except RunInterrupted:
                send("result", "stopped")
            except Exception as error:
                send("error", _picklable(error), traceback.format_exc())


@contextmanager
def _main_not_imported() -> Iterator[None]:
    """Start processes in this block that do not import the main module: a user's script.

    They import the files that specs refer to, and report an error there in one line.
    """
    main = sys.modules["__main__"]
    named: dict[str, Any] = vars(main)
    names: tuple[str, ...] = ("__file__", "__spec__")
    hidden = {name: named.pop(name) for name in names if name in named}
    main.__spec__ = None
    try:
        yield
    finally:
        named.update(hidden)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FedExPError(f"{type(error).__name__}: {error}")
    return error


def _exit_with_parent() -> None:
    """Exit when the parent does: one that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this block, and for good in processes started in it.

    This process receives on leaving what arrived meanwhile. A worker never does, not even while it
    imports: its parent asks it to stop.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # started later, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
