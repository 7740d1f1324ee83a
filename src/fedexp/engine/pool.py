"""Threads that share out work, each of them alone on a core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """As many threads as torch would use for one operation; operations in them use one each."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results for all items, in their order; one thread is the caller's own."""
        if self.count == 1:
            return [function(item) for item in items]
        before = torch.get_num_threads()
        # libraries keep one number for all threads, which the last to set it has chosen
        torch.set_num_threads(1)
        try:
            return list(self._threads.map(function, items))
        finally:
            torch.set_num_threads(before)
