"""Runs over worker processes, with word of every round, and an end that does not hang."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch

from fedexp.errors import FedExPError
from fedexp.experiments.compare import OnRound, Outcome, Row, run_one
from fedexp.experiments.spec import Spec

# A worker's way to tell of its rounds: queues pass to a process when it starts, and only then.
_to_parent: Any = None


def run_all(specs: Sequence[Spec], jobs: int, on_round: OnRound) -> list[Outcome]:
    """Run the specs, `jobs` at a time, one thread each; outcomes are in the order of the specs.

    A run that fails, or Ctrl-C, ends the others at once.
    """
    if jobs <= 1 or len(specs) == 1:
        return [run_one(spec, on_round) for spec in specs]
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(jobs, len(specs)), context, _init_worker, (events,))
    try:
        with _deaf_to_interrupts():
            futures = [pool.submit(_run_in_worker, spec) for spec in specs]
        for spec, row in _events(events, futures):
            on_round(spec, row)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise FedExPError("a worker process died, perhaps of memory; try --jobs 1") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started in here never hear Ctrl-C, not even while they import: it is the parent's.

    Only the main thread may arrange that; started from another, workers hear it as usual.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _init_worker(events: Any) -> None:
    global _to_parent
    _to_parent = events
    events.cancel_join_thread()  # a parent that has stopped reading must not keep a worker alive
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # dropped clients are counted in the rows


def _run_in_worker(spec: Spec) -> Outcome:
    tell: Callable[[Spec, Row], None] = lambda spec, row: _to_parent.put((spec, row))  # noqa: E731
    return run_one(spec, tell)


def _events(events: Any, futures: Sequence[Future[Outcome]]) -> Iterator[tuple[Spec, Row]]:
    """Rounds as they happen in the workers; ends when all are done, or one has failed."""
    while not any(f.done() and f.exception() is not None for f in futures):
        finished = all(f.done() for f in futures)
        try:
            yield events.get(timeout=0.1)
        except queue.Empty:
            if finished:
                return
