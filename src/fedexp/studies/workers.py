"""Trials over worker processes. The parent alone decides, and alone writes.

A worker trains one spec at a time. After every round it sends the row and waits for a word: go on,
or give up. So a search can prune, and knows nothing of workers. Other parents may be at work on the
same study; where they have all that is left, they are waited for.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from fedexp.errors import FedExPError, NonFiniteUpdateWarning
from fedexp.experiments.spec import Spec
from fedexp.runs.pool import deaf_to_interrupts, end_with_parent
from fedexp.studies.trial import Row, Scored, run_trial

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
