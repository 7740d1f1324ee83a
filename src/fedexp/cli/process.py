"""Ctrl-C and a request to end (SIGTERM) as a wish: the round is finished first.

A command on many ranks: one of them speaks, and all of them end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from types import FrameType

from fedexp.distributed import Ranks, current, launched, ranks
from fedexp.distributed.failure import REMEDY, failure_report, monitored


class StopWish:
    """Whether somebody wants the work to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a process that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and launched():
            # from torchrun, perhaps because another rank has ended, perhaps for the second time
            self.signal = self.signal or number
            return
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        print(f"fedexp: stopping after this round{again}", file=sys.stderr, flush=True)


@contextmanager
def stop_wish(listen: bool = True) -> Iterator[StopWish]:
    """Listen in this block; a second signal interrupts at once. Only the main thread can."""
    wish = StopWish()
    if not listen or threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {each: signal.signal(each, wish.hear) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def taking_part() -> Iterator[Ranks | None]:
    """The ranks of this job, of which only the first is heard; None for a lone process."""
    among = ranks()
    if among is None:
        yield None
        return
    # torchrun ends what a dead rank has left in this way; there is still a line to print
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with monitored(among), _silence() if among.rank else nullcontext():
        yield among


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def is_ranked() -> bool:
    """Whether this process is one of several."""
    return current() is not None


def surprise(error: Exception) -> str:
    """What nobody expected, in a line; torchrun's own report shows where it happened."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    what = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {what}; {REMEDY}"


def failure(message: str | None, status: int) -> int:
    """Print why the job has failed, once for all ranks, and end this one with the status.

    Args:
        message: what went wrong here; None where this rank was only interrupted.
        status: the exit status.
    """
    among = current()
    if among is None:
        print(f"fedexp: error: {message or 'interrupted'}", file=sys.stderr)
        return status
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # torchrun may want to end us before we have spoken
    if (line := failure_report(among, message)) is not None:
        print(f"fedexp: error: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a group that has lost a rank cannot be closed in good order
