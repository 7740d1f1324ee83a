"""Several processes at work on one study; torch is imported once, and each is a fork.

sharers.py STUDY PROTOCOL    the first of three is killed in its second trial

Beside the study each writes which points it began (NUMBER.begun), and those that live what they
found (NUMBER.found).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedexp.tune.grids import Point
from fedexp.tune.search import OnRow, Protocol, Study, tune
from fedexp.tune.trial import Row

PROCESSES = 3
GRID = {"server.lr": (1.0, 3.0, 10.0), "local.lr": (0.01, 0.03, 0.1)}
RANGES = {"server.lr": (1.0, 10.0), "local.lr": (0.01, 0.1)}
TRIALS = 9


class Sharer:
    """One of the processes: works when all have begun, and dies where it is to."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._begun: list[Point] = []

    @contextmanager
    def __call__(self, left: int) -> Iterator[OnRow]:
        yield self._on_row

    def _on_row(self, point: Point, row: Row) -> None:
        if row["round"] != 1:
            return
        self._begun.append(point)
        (self._folder / f"{self._number}.begun").write_text(json.dumps(self._begun))
        deadline = time.monotonic() + 60
        while len(list(self._folder.glob("*.begun"))) < PROCESSES:
            assert time.monotonic() < deadline, "not all processes got a trial"
            time.sleep(0.01)
        if self._number == 0 and len(self._begun) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def work(study: Study, number: int) -> None:
    tried = tune(study, watching=Sharer(study.path.parent, number))
    found = [[each.point, each.scored.score] for each in tried]
    (study.path.parent / f"{number}.found").write_text(json.dumps(found))


def main(path: Path, protocol: Protocol) -> None:
    from tests.studies.problems import small_study

    torch.set_num_threads(1)
    values = RANGES if protocol == "free" else GRID
    study = small_study(path, protocol=protocol, values=values, trials=TRIALS)
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if child == 0:
            work(study, number)
            os._exit(0)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [-signal.SIGKILL, 0, 0], ends


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(Path(sys.argv[1]), "free" if sys.argv[2] == "free" else "paper")
