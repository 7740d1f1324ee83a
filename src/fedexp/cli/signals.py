"""Ctrl-C and a request to end (SIGTERM) as a wish: the round is finished first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedexp.distributed import launched


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
