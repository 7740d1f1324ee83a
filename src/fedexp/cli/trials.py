"""Trials as they are watched: word of every round, and a line where others are waited for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedexp.cli.progress import watch
from fedexp.cli.signals import StopWish
from fedexp.runs import Stopped
from fedexp.studies.grids import Point
from fedexp.studies.trial import Row
from fedexp.studies.tune import OnRow, Study, Watching
from fedexp.studies.workers import wait_a_moment


def watching(study: Study, quiet: bool, wish: StopWish) -> Watching:
    """A bar, or lines, over the trials that are left; stops them where that is wished for."""

    @contextmanager
    def over(left: int) -> Iterator[OnRow]:
        spec = study.run.spec
        with watch(f"{spec.task} {spec.algorithm}", study.run.rounds, left, quiet) as bar:

            def on_row(point: Point, row: Row) -> None:
                bar(dict(row), " ".join(f"{name}={value:.3g}" for name, value in point.items()))
                if wish():
                    raise Stopped(None, row["round"])

            yield on_row

    return over


class Patience:
    """Waits a moment for other processes, and says so once."""

    def __init__(self, wish: StopWish) -> None:
        self._wish, self._told = wish, False

    def __call__(self) -> None:
        if not self._told:
            print("fedexp: the last trials are with other processes; waiting", file=sys.stderr)
        self._told = True
        if self._wish():
            raise Stopped(None, 0)
        wait_a_moment()
