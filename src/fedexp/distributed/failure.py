"""How a job ends that cannot go on: one line for all ranks, from whoever knows most.

A rank that ends for a reason of its own leaves it in the store, and raises the alarm. All ranks
that live answer it, even those that wait for a rank that is gone, so the others must be dead.
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

from fedexp.distributed.group import Ranks

LOOK = 0.25  # seconds between looks at the store
PATIENCE = 3.0  # for the other ranks to answer
GRACE = 10.0  # for a rank to end by itself
ALARM, CALL, SPOKEN = "fedexp/alarm", "fedexp/call", "fedexp/spoken"
ENDED, ALIVE, LEFT = "fedexp/ended/{}", "fedexp/alive/{}", "fedexp/left/{}"
REMEDY = (
    "start the same command again, with any number of ranks: runs that are kept go on from their "
    "last checkpoint"
)


@contextmanager
def watched(among: Ranks) -> Iterator[None]:
    """In this block the rank answers alarms, and ends soon after one wherever it is stuck.

    Only from the main thread, since signals are listened for.
    """
    over = threading.Event()
    with _signals() as heard:
        watch = threading.Thread(target=_watch, args=(among, over, heard), daemon=True)
        watch.start()
        try:
            yield
            with suppress(RuntimeError):
                among.store.set(LEFT.format(among.rank), "")  # in good order: not missing
        finally:
            over.set()
            watch.join(PATIENCE)  # at the end of the process it must not be at work in the store


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Where the numbers of signals arrive at once, even while the main thread waits for a GPU."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)


def _watch(among: Ranks, over: threading.Event, heard: socket.socket) -> None:
    try:
        while not among.store.check([ALARM]):
            if _asked_to_end(heard):
                _answer(among)  # before others ask: it may take as long as they are patient
                if not over.wait(PATIENCE) and another_failed(among):
                    break
            if among.store.check([CALL]):
                _answer(among)
            if over.wait(LOOK):
                return
        _answer(among)
    except RuntimeError:  # the store is gone, and torchrun or the first rank with it
        pass
    if over.wait(GRACE):
        return
    if (line := last_words(among, None)) is not None:
        print(f"fedexp: error: {line}", file=sys.__stderr__, flush=True)
    os._exit(1)


def _asked_to_end(heard: socket.socket) -> bool:
    """torchrun asks so when a rank has died, which those that wait for NCCL do not notice."""
    with suppress(OSError):  # none has come
        return signal.SIGTERM in heard.recv(4096)
    return False


def _answer(among: Ranks) -> None:
    among.store.set(ALIVE.format(among.rank), "")


def last_words(among: Ranks, reason: str | None) -> str | None:
    """The line that this rank has to print; None where another rank says it, or has said it.

    A mistake of the user's is made on all ranks, and the first tells of it. What befalls one rank
    alone is told by that rank, and a rank that was killed is told of by one that misses it.

    Args:
        among: the ranks.
        reason: why this rank ends; None where it ends because of others or was interrupted.
    """
    try:
        among.store.set(ENDED.format(among.rank), reason or "")
        among.store.set(ALARM, "")
        line = _own(among, reason) if reason else _of_others(among)
        return line if line and _claims(among) else None
    except RuntimeError:  # as above
        return f"torchrun, or the first rank, ended; {REMEDY}" if among.rank <= 1 else None


def see_others_off(among: Ranks) -> None:
    """Let the others end before the first rank does, where their store would end with it."""
    if among.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _waited_for(among, list(range(among.world)), (ENDED,))
        time.sleep(2 * LOOK)  # they may still be reading


def another_failed(among: Ranks) -> bool:
    """Whether a rank has failed or is dead; for one that is asked to stop and wonders why."""
    try:
        among.store.set(CALL, "")
        _answer(among)
        return bool(among.store.check([ALARM])) or bool(_missing(among))
    except RuntimeError:
        return True


def record_for_torchrun(error: Exception) -> None:
    """Let torchrun's own report show what nobody expected, with its traceback."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)


def _own(among: Ranks, reason: str) -> str | None:
    if among.is_first:
        return reason
    # the first rank may be about to say the same
    first_speaks = _waited_for(among, [0], (ENDED,))
    return None if first_speaks else f"rank {among.rank}: {reason}"


def _of_others(among: Ranks) -> str | None:
    everyone = list(range(among.world))
    if missing := _missing(among):
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"{names} ended without a word (killed, or out of memory); {REMEDY}"
    ended = [rank for rank in everyone if among.store.check([ENDED.format(rank)])]
    reasons = ((rank, among.store.get(ENDED.format(rank)).decode()) for rank in ended)
    if told := next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), None):
        return told
    _waited_for(among, [0], (ENDED, LEFT))
    left = among.store.check([LEFT.format(0)])  # the first was stopped, and has said so
    return None if left else "interrupted"


def _missing(among: Ranks) -> list[int]:
    """The ranks that do not answer."""
    everyone = list(range(among.world))
    return sorted(set(everyone) - set(_waited_for(among, everyone, (ENDED, ALIVE, LEFT))))


def _waited_for(among: Ranks, wanted: list[int], signs: tuple[str, ...]) -> list[int]:
    """Those of the wanted ranks that give a sign, once all do or patience is at its end."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [r for r in wanted if any(among.store.check([sign.format(r)]) for sign in signs)]
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(LOOK / 5)


def _claims(among: Ranks) -> bool:
    """Whether this rank is the first that wants to speak."""
    mine = str(among.rank)
    return bool(among.store.compare_set(SPOKEN, "", mine).decode() == mine)
