"""Shares of many runs: each job of an array runs its own, and all keep them in one folder.

Runs over worker processes, with word of every round, and an end that does not hang.

Many runs over the ranks of a job: whole runs where there are enough, else the clients of each.

Whole runs need no word between ranks until all are over, so they come first. Where there are fewer
runs than ranks, all ranks share the cohort of one run after another.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from fedexp.distributed import RankLostError, Ranks
from fedexp.errors import FedExPError, UsageError
from fedexp.runs.execute import execute, stored_outcome
from fedexp.runs.files import Row
from fedexp.runs.folder import RESULT, BusyError, OtherContentError, RunWarning
from fedexp.runs.journal import CHECKPOINT_EVERY, Stopped
from fedexp.runs.options import build_task, split_task_options
from fedexp.runs.spec import OnRound, Outcome, Spec, folder_of
from fedexp.tasks import Task

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One share of the work, counted from 1.

    Which runs are whose follows from their order alone, so jobs need not know of each other.

    Args:
        index: which share, from 1 to `count`.
        count: how many there are.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, items: Sequence[T]) -> list[T]:
        """This share of the items, dealt as cards are.

        Runs that stand beside each other cost alike (the seeds of an algorithm, the algorithms of a
        task), so every share gets as many of each kind as any other, but for one.

        >>> Shard(2, 3).of("abcdefgh")
        ['b', 'e', 'h']
        """
        return list(items[self.index - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """A share as people write it.

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


# A worker's way to tell of its rounds, and its parent's to ask it to stop: these pass to a process
# when it starts, and only then.
_to_parent: Any = None
_asked_to_stop: Any = None

OnBusy = Callable[[Spec], None]
Answer = Outcome | Literal["busy", "stopped"]


class _Keeping(NamedTuple):
    """Where runs are kept, and whether one that another process holds is left to it."""

    root: Path | None
    checkpoint_every: float
    skip_busy: bool
    restart: bool


def run_all(
    specs: Sequence[Spec],
    jobs: int,
    on_round: OnRound,
    root: Path | None = None,
    *,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: Callable[[], bool] = lambda: False,
    on_busy: OnBusy | None = None,
    restart: bool = False,
) -> list[Outcome]:
    """Run the specs, `jobs` at a time, one thread each; outcomes are in the order of the specs.

    With a `root` every run is kept in it: what is there is returned at once, what was interrupted
    resumes. Where `stop` returns True, all stop after their round and `Stopped` is raised. A run
    that fails ends the others at once; so does one that another process holds, unless there is an
    `on_busy` to call: then it is left to the other process and not returned. `restart` discards
    what is stored of the specs.
    """
    done = {} if root is None or restart else dict(stored(specs, root, on_round))
    waiting = [k for k in range(len(specs)) if k not in done]
    todo = [specs[k] for k in waiting]
    keeping = _Keeping(root, checkpoint_every, on_busy is not None, restart)
    answers: Iterable[Answer]
    if jobs <= 1 or len(waiting) <= 1:
        answers = (_unless_busy(spec, on_round, stop, keeping) for spec in todo)
    else:
        answers = _in_workers(todo, jobs, on_round, stop, keeping)
    for k, answer in zip(waiting, answers, strict=True):
        if isinstance(answer, Outcome):
            done[k] = answer
        elif on_busy is not None:
            on_busy(specs[k])
    return [done[k] for k in sorted(done)]


def _unless_busy(
    spec: Spec, on_round: OnRound, stop: Callable[[], bool], keeping: _Keeping
) -> Answer:
    """The outcome of a run, unless it is left to another process."""
    how: dict[str, Any] = {"checkpoint_every": keeping.checkpoint_every, "stop": stop}
    try:
        return execute(spec, keeping.root, on_round, restart=keeping.restart, **how)
    except BusyError:
        if not keeping.skip_busy:
            raise
        return "busy"


def stored(
    specs: Sequence[Spec], root: Path, on_round: OnRound, skip_others: bool = False
) -> Iterator[tuple[int, Outcome]]:
    """The runs that are over, by their place; no worker needs to start for them.

    A run's id and fingerprint follow from its task, so that is built, once for all that share it.
    Runs that are made from something else are refused, or left out by `skip_others`.
    """
    built: tuple[Any, Task] | None = None
    for k in sorted(range(len(specs)), key=lambda k: specs[k].seed):
        spec = specs[k]
        if not any(root.glob(f"{spec.task}-{spec.algorithm}-s{spec.seed}-*/{RESULT}")):
            continue
        of_task, _ = split_task_options(dict(spec.options))
        key = spec.task, spec.seed, spec.mode, of_task
        if built is None or built[0] != key:
            built = key, build_task(spec.task, of_task, spec.seed, spec.mode)
        run = spec.prepare(built[1])
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


def _in_workers(
    specs: Sequence[Spec],
    jobs: int,
    on_round: OnRound,
    stop: Callable[[], bool],
    keeping: _Keeping,
) -> list[Answer]:
    context = multiprocessing.get_context("spawn")
    events, asked = context.Queue(), context.Event()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(jobs, len(specs)), context, _init_worker, (events, asked))
    try:
        with deaf_to_interrupts():
            futures = [pool.submit(_run_in_worker, spec, keeping) for spec in specs]
        for spec, row in _events(events, futures, lambda: asked.set() if stop() else None):
            on_round(spec, row)
        answers = [future.result() for future in futures]
        if "stopped" in answers:
            raise Stopped(keeping.root, 0)
        return answers
    except BrokenProcessPool:
        raise FedExPError("a worker process died, perhaps of memory; try --jobs 1") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # deaf to less; a run that is killed loses nothing


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started in here never hear Ctrl-C or a request to end: those are the parent's.

    Not even while they import. The parent hears of them on leaving, so that none is lost.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # where it started in here, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(events: Any, asked: Any) -> None:
    global _to_parent, _asked_to_stop
    _to_parent, _asked_to_stop = events, asked
    events.cancel_join_thread()  # a parent that has stopped reading must not keep a worker alive
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # dropped clients are counted in the rows
    warnings.simplefilter("always", RunWarning)
    warnings.showwarning = _tell_of_warning


def _tell_of_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    _to_parent.put(message)


def end_with_parent() -> None:
    """A parent that was killed cannot end its workers: they watch for it themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(spec: Spec, keeping: _Keeping) -> Answer:
    """The outcome of a run, unless it was asked to stop."""
    if _asked_to_stop.is_set():
        return "stopped"
    tell: Callable[[Spec, Row], None] = lambda spec, row: _to_parent.put((spec, row))  # noqa: E731
    try:
        return _unless_busy(spec, tell, _asked_to_stop.is_set, keeping)
    except Stopped:
        return "stopped"


def _events(
    events: Any, futures: Sequence[Future[Answer]], between: Callable[[], None]
) -> Iterator[tuple[Spec, Row]]:
    """Rounds as they happen in the workers, until all are done; raises what one of them does.

    What a worker warns of is warned of here.
    """
    while True:
        between()
        over = [future.result() for future in futures if future.done()]  # or what one raised
        try:
            event = events.get(timeout=0.1)
        except queue.Empty:
            if len(over) == len(futures):
                return
            continue
        if isinstance(event, Warning):
            warnings.warn(event, stacklevel=2)
        else:
            yield event


def run_spread(
    specs: Sequence[Spec],
    ranks: Ranks,
    on_round: OnRound,
    root: Path | None = None,
    *,
    checkpoint_every: float = CHECKPOINT_EVERY,
    stop: Callable[[], bool] = lambda: False,
    on_busy: OnBusy | None = None,
    restart: bool = False,
) -> list[Outcome]:
    """Run the specs, as `run_all` does; every rank calls it, and gets all outcomes.

    What is stored already is for the first rank to say, of a folder that all ranks see. `on_round`
    and `on_busy` are told on each rank of what that rank does.
    """
    found = {} if restart else _over(specs, ranks, root)
    left = [spec for spec in specs if spec not in found]
    keeping: dict[str, Any] = {"checkpoint_every": checkpoint_every, "stop": stop}
    keeping["restart"] = restart
    if len(left) >= ranks.world_size:
        mine = Shard(ranks.rank + 1, ranks.world_size).of(left)
        own = run_all(mine, 1, on_round, root, on_busy=on_busy, **keeping)
        found |= {each.spec: each for part in _gathered(own, ranks, stop) for each in part}
    else:
        for spec in left:
            try:
                found[spec] = execute(spec, root, on_round, ranks=ranks, **keeping)
            except BusyError:  # on every rank
                if on_busy is None:
                    raise
                on_busy(spec)
    return [found[spec] for spec in specs if spec in found]


def told_of(runs: int, ranks: Ranks | None) -> int:
    """Of how many runs this rank hears, at most: its share of whole ones, or each that all share.

    >>> told_of(10, None)
    10
    """
    if ranks is None or runs < ranks.world_size:
        return runs
    return math.ceil(runs / ranks.world_size)


def _over(specs: Sequence[Spec], ranks: Ranks, root: Path | None) -> dict[Spec, Outcome]:
    """The runs that were over before."""
    found = {}
    if root is not None and ranks.is_first:
        found = {specs[k]: outcome for k, outcome in stored(specs, root, lambda spec, row: None)}
    return ranks.broadcast(found)


def _gathered(
    own: list[Outcome], ranks: Ranks, stop: Callable[[], bool]
) -> Sequence[list[Outcome]]:
    """Everyone's outcomes, when the last rank is ready, which may take long."""
    try:
        ranks.barrier()
    except RankLostError:
        if stop():
            raise Stopped(None, 0) from None  # as the others did
        raise
    return ranks.all_gather_object(own)
