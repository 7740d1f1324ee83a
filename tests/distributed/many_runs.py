"""Runs and trials over three ranks; what each rank heard and found goes to FOLDER/RANK.json.

many_runs.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from fedexp.distributed import Ranks
from fedexp.runs import run_all
from fedexp.runs.pool import run_spread
from fedexp.runs.spec import Spec
from fedexp.tune.epsilon import EPS, VALUES, tune_epsilon
from fedexp.tune.grids import Point
from fedexp.tune.search import OnRow, tune
from fedexp.tune.trial import Row
from tests.distributed.launch import joined, on_ranks
from tests.runs.helpers import tiny, untimed
from tests.studies.problems import small_study

WORLD = 3
GRID = {"server.lr": (1.0, 10.0), "local.lr": (0.01, 0.1)}
FEW = {"local.lr": (0.01, 0.1)}
Case = tuple[list[str], Any]


def runs(seeds: int, kept: str | None, folder: Path, among: Ranks | None) -> Case:
    """Which seeds this rank was told of, and the rows of all of them."""
    specs = [tiny(seed=seed) for seed in range(seeds)]
    root = folder / kept if kept else None
    heard: list[str] = []

    def listen(spec: Spec, row: dict[str, Any]) -> None:
        heard.append(str(spec.seed))

    if among is None:
        outcomes = run_all(specs, 1, listen, root)
    else:
        outcomes = run_spread(specs, among, listen, root)
    return list(dict.fromkeys(heard)), [untimed(each.rows) for each in outcomes]


class Watcher:
    """Which points this rank has begun; with a folder, none goes on before all ranks have one."""

    def __init__(self, meeting: Path | None = None) -> None:
        self.begun: list[str] = []
        self._meeting = meeting

    @contextmanager
    def __call__(self, left: int) -> Iterator[OnRow]:
        yield self._on_row

    def _on_row(self, point: Point, row: Row) -> None:
        if row["round"] == 1:
            self.begun.append(json.dumps(point))
            self._meet()

    def _meet(self) -> None:
        deadline = time.monotonic() + 60
        if self._meeting is not None:
            (self._meeting / f"{os.getpid()}.here").touch()
            while len(list(self._meeting.glob("*.here"))) < WORLD:
                assert time.monotonic() < deadline, "not every rank has got a trial"
                time.sleep(0.01)


def grid(values: dict[str, Any], name: str, folder: Path, among: Ranks | None) -> Case:
    study = small_study(folder / name, values=values)
    whole = among is not None and study.size >= WORLD
    watcher = Watcher(folder if whole else None)
    tried = tune(study, watching=watcher, ranks=among)
    return watcher.begun, [[each.point, each.scored.score] for each in tried]


def free(folder: Path, among: Ranks | None) -> Case:
    """Four trials, then a last one for all ranks together."""
    ranges = {"server.lr": (1.0, 10.0), "local.lr": (0.01, 0.1)}
    study = small_study(folder / "free.db", protocol="free", values=ranges, trials=4)
    watcher = Watcher()
    tune(study, watching=watcher, ranks=among)
    tried = tune(replace(study, trials=5), watching=watcher, ranks=among)
    return watcher.begun, [[each.point, each.scored.score] for each in tried]


def rule(folder: Path, among: Ranks | None) -> Case:
    study = small_study(folder / "eps.db", "fedexp", "epsilon", {EPS: VALUES})
    watcher = Watcher()
    found = tune_epsilon(study, watching=watcher, ranks=among)
    return watcher.begun, [found.chosen, found.ended, [[e, s.score] for e, s in found.tried]]


CASES: dict[str, Callable[[Path, Ranks | None], Case]] = {
    "whole": partial(runs, 5, "kept"),
    "fewer left": partial(runs, 7, "kept"),
    "enough left": partial(runs, 10, "kept"),
    "again": partial(runs, 10, "kept"),
    "unkept": partial(runs, 4, None),
    "grid": partial(grid, GRID, "grid.db"),
    "few": partial(grid, FEW, "few.db"),
    "free": free,
    "rule": rule,
}


def work(folder: Path, among: Ranks) -> None:
    found = {name: case(folder, among) for name, case in CASES.items()}
    (folder / f"{among.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    codes = on_ranks(WORLD, joined, partial(work, Path(sys.argv[1])))
    assert codes == [0] * WORLD
