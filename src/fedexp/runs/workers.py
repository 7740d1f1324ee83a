"""Worker processes that execute runs, one thread each, for `fedexp.runs.pool`.

A worker receives experiments over a pipe, builds their tasks (importing the user's file where one
refers to it), and sends every row and the result back. It looks at the pipe for a request to stop
after every round. Workers are killed when the parent stops using them, and exit by themselves if it
is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fedexp.distributed import Ranks
from fedexp.engine.programs import SharedPrograms
from fedexp.errors import FedExPError, UsageError, WorkerDiedError
from fedexp.experiment import CHECKPOINT_EVERY, Experiment, Resources, Row
from fedexp.references import load_object
from fedexp.runs.execute import Storage, execute
from fedexp.runs.fingerprint import Fingerprint, data_digests, fingerprint_of_object
from fedexp.runs.folder import BusyError, RunWarning
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.spec import Outcome, folder_of
from fedexp.tasks import Task

POLL = 0.1  # seconds between looks at the request to stop while workers are silent
RETRY = 0.3  # seconds before the next call of `take` on a queue that had no run to start

Stop = Callable[[], bool]
Result = Outcome | Literal["busy", "stopped"]


@dataclass(frozen=True)
class Job:
    """A run to execute, and the name that its queue gave it."""

    key: Any
    experiment: Experiment


class RunQueue(Protocol):
    """Runs to execute, handed out one at a time; used by one process only.

    Attributes:
        references: to the user's objects that the runs need, which workers import. Where one
            differs there, all runs are executed in this process.
    """

    @property
    def references(self) -> Iterable[str]: ...

    def take(self) -> Job | None:
        """Return the next run, or None if none can start at the moment."""

    def is_done(self) -> bool:
        """Return whether no run is left to start, and none that another process executes."""

    def on_round(self, job: Job, row: Row) -> bool:
        """Handle the row of a round; return False to prune the run, unless it was the last."""

    def on_result(self, job: Job, result: Result) -> None:
        """Handle the end of a run: "stopped" if `on_round` returned False, "busy" if skipped."""


@dataclass(frozen=True)
class Execution:
    """How the runs of a queue are executed.

    Attributes:
        root: folder of all runs; None stores nothing.
        checkpoint_every: seconds between checkpoints.
        restart: discard what is stored of the runs.
        skip_busy: skip a run that another process is executing instead of raising.
        weights: store checkpoints and models, not only rows and results.
    """

    root: Path | None = None
    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    skip_busy: bool = False
    weights: bool = True


def fingerprints_of(references: Iterable[str]) -> dict[str, Fingerprint]:
    """Digest the user's own objects as this process has them."""
    fingerprints = {}
    for reference in dict.fromkeys(references):
        with suppress(UsageError):  # reported by the run itself
            fingerprints[reference] = fingerprint_of_object(load_object(reference))
    return fingerprints


def _changed_object(objects: Mapping[str, Fingerprint]) -> str | None:
    """Return the reference of the first object that differs from the parent's.

    A script may have changed it, or a global that it reads, under `if __name__ == "__main__":`.
    """
    changed = None
    for reference, wanted in objects.items():
        value = load_object(reference)
        differing = set(wanted.differences(fingerprint_of_object(value)))
        if isinstance(value, Task) and not differing.isdisjoint(data_digests(value)):
            raise UsageError(
                f"{reference} has other data in every process that imports it; fix its random "
                "seed, e.g. torch.manual_seed(0) where the file begins"
            )
        changed = changed or (reference if differing else None)
    return changed


class Executor:
    """Executes one run after another in this process.

    They share the task and its data, trials of engines and CUDA graphs, as far as these are equal.

    Args:
        how: options of every run.
    """

    def __init__(self, how: Execution) -> None:
        self.programs = SharedPrograms()
        self._how = how
        self._last: Experiment | None = None

    def close(self) -> None:
        """Release what the runs shared, on a GPU too."""
        self.programs.clear()

    def __call__(
        self,
        experiment: Experiment,
        on_round: Callable[[Row], bool],
        stop: Stop,
        ranks: Ranks | None = None,
    ) -> Result:
        """Return the result; raise `RunInterrupted` if `stop`, not `on_round`, ended the run."""
        how, wanted = self._how, True

        def handle(experiment: Experiment, row: Row) -> None:
            nonlocal wanted
            wanted = wanted and on_round(row)

        experiment = self._sharing(experiment)
        folder = None if how.root is None else folder_of(experiment, how.root)
        resources = Resources(
            programs=self.programs,
            checkpoint_every=how.checkpoint_every,
            stop=lambda: not wanted or stop(),
            is_pruned=lambda: not wanted,
        )
        storage = Storage(folder, how.restart, weights=how.weights)
        try:
            outcome = execute(experiment, storage, handle, resources, ranks)
        except BusyError:
            if not how.skip_busy:
                raise
            return "busy"
        except RunInterrupted:
            if wanted:
                raise
            return "stopped"
        return replace(outcome, state=None)  # too large for a pipe

    def _sharing(self, experiment: Experiment) -> Experiment:
        """Return the run, resolved; drop what it cannot share, before it builds its own."""
        last, key = self._last, experiment.task_key
        if last is not None and last.task_key != key:  # data may fit in memory only once
            if last.task_key.factory != key.factory:
                self.programs.clear()
            self.programs.drop_data()
        self._last = last = experiment.sharing(last)
        _ = last.resolved
        return last


def run_in_workers(
    queue: RunQueue, count: int, how: Execution, stop: Stop, on_wait: Callable[[], None]
) -> str | None:
    """Execute the runs of a queue in worker processes.

    The user's objects that a worker imports must have the fingerprints that they have here.

    Returns the reference of an object that workers import as another one than this process has;
    no run is started then.
    """
    stopping = interrupted = False
    retry_at = 0.0
    with worker_processes(count, how, fingerprints_of(queue.references)) as workers:
        starting = list(workers)
        while starting and not stop():
            for worker in [w for w in starting if w.connection.poll(POLL / len(starting))]:
                kind, changed = worker.receive()
                if changed is not None:
                    return changed
                if kind == "ready":
                    starting.remove(worker)
        while True:
            stopping = stopping or stop()
            idle = [worker for worker in workers if worker.job is None]
            if stopping:
                for worker in workers:
                    worker.request("stop")
            elif idle and time.monotonic() >= retry_at:
                while idle and (job := queue.take()):
                    idle.pop(0).start(job)
                retry_at = time.monotonic() + RETRY
            running = [worker for worker in workers if worker.job is not None]
            if not running:
                if queue.is_done() and not interrupted:
                    return None
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
def worker_processes(
    count: int, how: Execution, objects: Mapping[str, Fingerprint]
) -> Iterator[list[_Worker]]:
    """Start worker processes; kill them at the end of the block."""
    workers: list[_Worker] = []
    try:
        with interrupts_blocked():
            workers.extend(_Worker(how, objects) for _ in range(count))
        yield workers
    finally:
        with interrupts_blocked():
            for worker in workers:
                worker.kill()  # workers ignore milder signals; a stored run loses nothing


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self, how: Execution, objects: Mapping[str, Fingerprint]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(worker_end, how, objects), daemon=True)
        with _main_not_imported():
            self._process.start()
        worker_end.close()  # so that either side notices the end of the other
        self.job: Job | None = None
        self._stop_sent = self._wanted = False

    def start(self, job: Job) -> None:
        self.job, self._stop_sent, self._wanted = job, False, True
        self._send(job.experiment.portable)

    def request(self, what: Literal["stop", "prune"]) -> None:
        """Ask the worker to end its run after the round, once."""
        if self.job is not None and not self._stop_sent:
            self._stop_sent = True
            self._send(what)

    def handle_message(self, queue: RunQueue) -> Literal["done", "interrupted"] | None:
        """Receive one message and pass it to the queue; return how the run ended if it did."""
        assert self.job is not None
        kind, content = self.receive()
        if kind == "warning":
            return None
        if kind == "row":
            if self._wanted and not queue.on_round(self.job, content):
                self._wanted = False
                self.request("prune")
            return None
        job, self.job = self.job, None
        if content == "stopped" and self._wanted:
            return "interrupted"
        queue.on_result(job, content)
        return "done"

    def receive(self) -> tuple[str, Any]:
        """Return kind and content of the next message; raise an error, pass on a warning."""
        try:
            kind, content, *more = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerDiedError("a worker process died, perhaps of memory") from None
        if kind == "error":
            if not isinstance(content, FedExPError):
                content.add_note(f"in a worker process:\n{more[0]}")
            raise content
        if kind == "warning":
            warnings.warn(content, stacklevel=3)
            return kind, None
        return kind, content

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _send(self, message: Experiment | str) -> None:
        with suppress(OSError):  # the worker has died, which `handle_message` reports
            self.connection.send(message)


def _serve(connection: Connection, how: Execution, objects: Mapping[str, Fingerprint]) -> None:
    """Check what the runs refer to, then execute those that the parent sends, until it ends.

    "stop" and "prune" end a run.
    """
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    run, request, sending = Executor(how), "", threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            connection.send(message)

    def on_round(row: Row) -> bool:
        send("row", row)
        return requested() != "prune"

    def requested() -> str:
        nonlocal request
        while connection.poll():
            request = connection.recv()
        return request

    warnings.simplefilter("ignore")  # dropped clients are counted in the rows
    warnings.simplefilter("always", RunWarning)
    warnings.showwarning = lambda message, *args, **more: send("warning", message)
    with suppress(EOFError, OSError):  # the parent has ended
        try:
            send("ready", _changed_object(objects))
        except Exception as error:
            send("error", _picklable(error), traceback.format_exc())
        while True:
            experiment = connection.recv()
            if isinstance(experiment, str):  # a request that arrived after the end of its run
                continue
            request = ""
            try:
                send("result", run(experiment, on_round, lambda: requested() == "stop"))
            except RunInterrupted:
                send("result", "stopped")
            except Exception as error:
                send("error", _picklable(error), traceback.format_exc())


@contextmanager
def _main_not_imported() -> Iterator[None]:
    """Start processes in this block that do not import the main module: a user's script.

    They import the files that runs refer to, and report an error there in one line.
    """
    main = sys.modules["__main__"]
    attributes: dict[str, Any] = vars(main)
    names: tuple[str, ...] = ("__file__", "__spec__")
    hidden = {name: attributes.pop(name) for name in names if name in attributes}
    main.__spec__ = None
    try:
        yield
    finally:
        attributes.update(hidden)


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
