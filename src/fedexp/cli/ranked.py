"""A command on many ranks: one of them speaks, and all of them end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress

from fedexp.distributed import Ranks, current, ranks
from fedexp.distributed.ending import (
    REMEDY,
    last_words,
    record_for_torchrun,
    see_others_off,
    watched,
)


@contextmanager
def taking_part() -> Iterator[Ranks | None]:
    """The ranks of this job, of which only the first is heard; None for a lone process."""
    among = ranks()
    if among is None:
        yield None
        return
    # torchrun ends what a dead rank has left in this way; there is still a line to print
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with watched(among), _silence() if among.rank else nullcontext():
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
    record_for_torchrun(error)
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
    if (line := last_words(among, message)) is not None:
        print(f"fedexp: error: {line}", file=sys.stderr, flush=True)
    see_others_off(among)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a group that has lost a rank cannot be closed in good order
