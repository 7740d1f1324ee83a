"""How a job ends that cannot go on: one line for all ranks, from whoever knows most.

A rank that ends for a reason of its own leaves it in the store, and raises the alarm. All ranks
that live answer it, even those that wait for a rank that is gone, so the others must be dead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedexp.distributed.group import Ranks

LOOK = 0.25  # seconds between looks at the store
PATIENCE = 3.0  # for the other ranks to answer
GRACE = 10.0  # for a rank to end by itself
ALARM, CALL, SPOKEN = "fedexp/alarm", "fedexp/call", "fedexp/spoken"
ENDED, ALIVE = "fedexp/ended/{}", "fedexp/alive/{}"
REMEDY = (
    "start the same command again, with any number of ranks: runs that are kept go on from their "
    "last checkpoint"
)


@contextmanager
def watched(among: Ranks) -> Iterator[None]:
    """In this block the rank answers alarms, and ends soon after one wherever it is stuck."""
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(among, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join(PATIENCE)  # at the end of the process it must not be at work in the store


def _watch(among: Ranks, over: threading.Event) -> None:
    try:
        while not among.store.check([ALARM]):
            if among.store.check([CALL]):
                among.store.set(ALIVE.format(among.rank), "")
            if over.wait(LOOK):
                return
        among.store.set(ALIVE.format(among.rank), "")
    except RuntimeError:  # the store is gone, and torchrun or the first rank with it
        pass
    if not over.wait(GRACE):
        os._exit(1)


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


def _of_others(among: Ranks) -> str:
    everyone = list(range(among.world))
    if missing := _missing(among):
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"{names} ended without a word (killed, or out of memory); {REMEDY}"
    ended = [rank for rank in everyone if among.store.check([ENDED.format(rank)])]
    reasons = ((rank, among.store.get(ENDED.format(rank)).decode()) for rank in ended)
    return next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), "interrupted")


def _missing(among: Ranks) -> list[int]:
    """The ranks that do not answer."""
    everyone = list(range(among.world))
    return sorted(set(everyone) - set(_waited_for(among, everyone, (ENDED, ALIVE))))


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
