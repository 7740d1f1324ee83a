"""Failure handling: exactly one rank reports the cause, and no rank hangs.

torchrun notices a dead process, sends SIGTERM to the others, kills them after 30 seconds and prints
its own multi-line report. It does not tell the surviving ranks which rank failed or why, and a rank
that is blocked in an NCCL kernel runs no Python signal handler. So each rank runs a monitor thread,
and ranks exchange a few keys through the job's store, which torchrun hosts and which survives them:

- a rank that fails writes its reason under `ENDED` and sets `FAILED`;
- each monitor answers `FAILED` (or `PING`) by writing `ALIVE`, so a rank without answer is dead;
- the rank that knows the cause claims `REPORTER` and prints one line; all others stay silent;
- a rank that is still blocked `EXIT_TIMEOUT` seconds after `FAILED` is ended by its monitor.

For ranks that are started without torchrun, rank 0 hosts the store. It then waits until the others
have set `LEFT`, as they would otherwise report the end of the store beside the cause.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedexp.distributed.group import Ranks, agent_hosts_store

POLL_INTERVAL = 0.25  # seconds between reads of the store
REPLY_TIMEOUT = 3.0  # seconds for other ranks to answer
EXIT_TIMEOUT = 10.0  # seconds for a rank to end by itself
FAILED, PING, REPORTER = "fedexp/failed", "fedexp/ping", "fedexp/reporter"
ENDED, ALIVE, DONE = "fedexp/ended/{}", "fedexp/alive/{}", "fedexp/done/{}"
LEFT = "fedexp/left/{}"
REMEDY = (
    "start the same command again, with any number of ranks: stored runs resume from their last "
    "checkpoint"
)


@contextmanager
def monitored(ranks: Ranks) -> Iterator[None]:
    """Run the monitor thread during the block; for the main thread, as it listens for signals."""
    finished = threading.Event()
    with _signal_socket() as signals:
        monitor = threading.Thread(target=_monitor, args=(ranks, finished, signals), daemon=True)
        monitor.start()
        try:
            yield
            with suppress(RuntimeError):
                ranks.store.set(DONE.format(ranks.rank), "")
        finally:
            finished.set()
            monitor.join(REPLY_TIMEOUT)  # it must not use the store while the process exits


@contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """Yield a socket that receives signal numbers even while the main thread is blocked in C."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before)


def _monitor(ranks: Ranks, finished: threading.Event, signals: socket.socket) -> None:
    """Answer other ranks; after a failure, end this process if it does not end by itself."""
    try:
        while not ranks.store.check([FAILED]):
            if _got_sigterm(signals):  # from torchrun: a rank has died, or the user stops the job
                _answer(ranks)
                if not finished.wait(REPLY_TIMEOUT) and another_failed(ranks):
                    break
            if ranks.store.check([PING]):
                _answer(ranks)
            if finished.wait(POLL_INTERVAL):
                return
        _answer(ranks)
    except RuntimeError:  # the store is gone, and torchrun with it
        pass
    if finished.wait(EXIT_TIMEOUT):
        return
    if (line := failure_report(ranks, None)) is not None:
        print(f"fedexp: error: {line}", file=sys.__stderr__, flush=True)
    os._exit(1)


def _got_sigterm(signals: socket.socket) -> bool:
    with suppress(OSError):  # none has arrived
        return signal.SIGTERM in signals.recv(4096)
    return False


def _answer(ranks: Ranks) -> None:
    ranks.store.set(ALIVE.format(ranks.rank), "")


def failure_report(ranks: Ranks, reason: str | None) -> str | None:
    """Return the line that this rank must print, or None if another rank reports the failure.

    An error on all ranks, such as a usage error, is reported by rank 0. An error on one rank is
    reported by that rank, and a rank that was killed by one that finds it missing.

    Args:
        ranks: the ranks of the job.
        reason: why this rank ends; None if it was interrupted or has lost another rank.
    """
    try:
        ranks.store.set(ENDED.format(ranks.rank), reason or "")
        ranks.store.set(FAILED, "")
        line = _own_failure(ranks, reason) if reason else _other_failure(ranks)
        line = line if line and _claim_report(ranks) else None
    except RuntimeError:
        return _lost_store(ranks)
    with suppress(RuntimeError):
        ranks.store.set(LEFT.format(ranks.rank), "")
        if ranks.is_first and not agent_hosts_store():
            _wait_for(ranks, list(range(ranks.world_size)), (LEFT, DONE))
    return line


def _lost_store(ranks: Ranks) -> str | None:
    """Return the report of a lost store, by one rank per machine: ranks cannot agree without it."""
    if agent_hosts_store():
        return f"torchrun ended; {REMEDY}" if ranks.local_rank == 0 else None
    reports = ranks.local_rank == 0 or ranks.rank == 1  # rank 0, which hosted it, is dead
    return f"rank 0 ended; {REMEDY}" if reports else None


def another_failed(ranks: Ranks) -> bool:
    """Return whether any rank has failed or is dead; after a SIGTERM, which has either cause."""
    try:
        ranks.store.set(PING, "")
        _answer(ranks)
        return bool(ranks.store.check([FAILED])) or bool(_missing(ranks))
    except RuntimeError:
        return True


def _own_failure(ranks: Ranks, reason: str) -> str | None:
    if ranks.is_first:
        return reason
    # if rank 0 ends as well, it has the same error and reports it
    return None if _wait_for(ranks, [0], (ENDED,)) else f"rank {ranks.rank}: {reason}"


def _other_failure(ranks: Ranks) -> str | None:
    if missing := _missing(ranks):
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"{names} died without an error message (killed, or out of memory); {REMEDY}"
    for rank in range(ranks.world_size):
        key = ENDED.format(rank)
        if ranks.store.check([key]) and (reason := ranks.store.get(key).decode()):
            return f"rank {rank}: {reason}"
    _wait_for(ranks, [0], (ENDED, DONE))
    stopped = ranks.store.check([DONE.format(0)])  # rank 0 was stopped, and has reported that
    return None if stopped else "interrupted"


def _missing(ranks: Ranks) -> list[int]:
    """Return the ranks that do not answer."""
    everyone = list(range(ranks.world_size))
    return sorted(set(everyone) - set(_wait_for(ranks, everyone, (ENDED, ALIVE, DONE))))


def _wait_for(ranks: Ranks, wanted: list[int], keys: tuple[str, ...]) -> list[int]:
    """Return the wanted ranks that have set one of the keys, as soon as all have or time is up."""
    deadline = time.monotonic() + REPLY_TIMEOUT
    while True:
        done = [r for r in wanted if any(ranks.store.check([key.format(r)]) for key in keys)]
        if done == wanted or time.monotonic() > deadline:
            return done
        time.sleep(POLL_INTERVAL / 5)


def _claim_report(ranks: Ranks) -> bool:
    """Return whether this rank is the first to claim the report."""
    name = str(ranks.rank)
    return bool(ranks.store.compare_set(REPORTER, "", name).decode() == name)
