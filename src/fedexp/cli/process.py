"""The process of a command: stop requests by signal, ranks under torchrun, and how it fails.

Ctrl-C and SIGTERM finish the round first. On many ranks only the first one prints, and exactly one
rank reports why the job failed.
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


class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a process that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second one interrupts at once."""
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
def stop_request(listen: bool = True) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM in this block; only the main thread can."""
    request = StopRequest()
    if not listen or threading.current_thread() is not threading.main_thread():
        yield request
        return
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.receive) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


StopWish = StopRequest  # the former names
stop_wish = stop_request


@contextmanager
def joined_ranks() -> Iterator[Ranks | None]:
    """Join the ranks of this job, of which only the first prints; None for a single process."""
    among = ranks()
    if among is None:
        yield None
        return
    # torchrun terminates the ranks that a dead one has left; they still have a line to print
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with monitored(among), _silenced() if among.rank else nullcontext():
        yield among


@contextmanager
def _silenced() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def unexpected(error: Exception) -> str | None:
    """Return an unexpected error in one line; None in a single process, where it is raised.

    torchrun's own report shows its traceback.
    """
    if current() is None:
        return None
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # torchrun may terminate us before we have printed
    if (line := failure_report(among, message)) is not None:
        print(f"fedexp: error: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a group that has lost a rank cannot be closed properly
