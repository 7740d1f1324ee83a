"""Shares of many runs: each job of an array runs its own, and all keep them in one folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedexp.errors import UsageError

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
