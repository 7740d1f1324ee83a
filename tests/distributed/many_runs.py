"""Runs and trials over three ranks; each writes what it started and found to FOLDER/RANK.json.

many_runs.py FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import fedexp as fx
from fedexp.distributed import Ranks
from fedexp.experiment import Experiment, Row
from fedexp.runs import RunInterrupted, run_all
from fedexp.runs.pool import run_queue
from fedexp.runs.workers import Execution, Job, Result
from fedexp.tuning.grids import Point, points
from tests.distributed.launch import joined, on_ranks
from tests.runs.helpers import TINY, tiny, untimed

WORLD = 3
GRID = {"server.lr": (1.0, 10.0), "local.lr": (0.01, 0.1)}
FEW = {"local.lr": (0.01, 0.1)}
Case = tuple[list[str], Any]


def runs(seeds: int, stored: str | None, folder: Path, group: Ranks | None) -> Case:
    """Return the seeds whose rows this rank received, and the rows of all seeds."""
    experiments = [tiny(seed=seed) for seed in range(seeds)]
    root = folder / stored if stored else None
    seeds_here: list[str] = []

    def on_round(experiment: Experiment, row: dict[str, Any]) -> None:
        seeds_here.append(str(experiment.seed))

    outcomes = run_all(experiments, 1, on_round, root, ranks=group)
    return list(dict.fromkeys(seeds_here)), [untimed(each.rows) for each in outcomes]


class Started:
    """Which trials this rank has started; with a folder, waits until every rank has one."""

    def __init__(self, meeting: Path | None = None) -> None:
        self.points: list[str] = []
        self._meeting = meeting

    def __call__(self, point: Point, row: Row) -> None:
        if row["round"] > 1:
            return
        self.points.append(json.dumps(point))
        deadline = time.monotonic() + 60
        if self._meeting is not None:
            (self._meeting / f"{os.getpid()}.here").touch()
            while len(list(self._meeting.glob("*.here"))) < WORLD:
                assert time.monotonic() < deadline, "a rank got no trial"
                time.sleep(0.01)


def tuned(runs: Path | None, started: Started, algorithm: str = "fedavg", **how: Any) -> Case:
    experiment = Experiment("synthetic", algorithm, rounds=12, options=TINY)
    tuning = fx.tune(experiment, runs=runs, on_round=started, **how)
    return started.points, [[trial.point, trial.result.score] for trial in tuning.trials]


def grid(values: dict[str, Any], stored: str | None, folder: Path, group: Ranks | None) -> Case:
    root = folder / stored if stored else None
    meets = group is not None and root is not None and len(points(values)) >= WORLD
    return tuned(root, Started(folder if meets else None), grid=values)


def free(folder: Path, group: Ranks | None) -> Case:
    """Four trials, then a last one for all ranks together."""
    started = Started()
    for count in (4, 5):
        case = tuned(folder / "free", started, protocol="free", trials=count)
    return case


def rule(folder: Path, group: Ranks | None) -> Case:
    return tuned(folder / "rule", Started(), "fedexp", protocol="epsilon")


class FirstStopped:
    """A queue of two runs, of which the first is stopped after its second round."""

    def __init__(self) -> None:
        self.left = [Job(seed, tiny(seed=seed)) for seed in (0, 1)]
        self.references: tuple[str, ...] = ()
        self.results: list[Any] = []

    def take(self) -> Job | None:
        return self.left.pop(0) if self.left else None

    def is_done(self) -> bool:
        return not self.left

    def on_round(self, job: Job, row: Row) -> bool:
        return bool(job.key or row["round"] < 2)

    def on_result(self, job: Job, result: Result) -> None:
        self.results.append(result if isinstance(result, str) else untimed(result.rows))


def stopped_run(folder: Path, group: Ranks | None) -> Case:
    """Two runs that all ranks share; only the first rank's queue is used."""
    queue = FirstStopped()
    run_queue(queue, 2, 1, Execution(), ranks=group)
    results = queue.results if group is None else group.broadcast(queue.results)
    return [str(len(queue.results))], results


def interrupted(stored: str | None, folder: Path, group: Ranks | None) -> Case:
    """Two runs that all ranks share; the last rank alone asks to stop, in the fourth round."""
    asks, calls = group is None or group.rank == WORLD - 1, itertools.count()
    experiments = [tiny(seed=seed, rounds=100_000) for seed in (0, 1)]
    root = folder / stored if stored else None
    try:
        run_all(experiments, root=root, ranks=group, stop=lambda: asks and next(calls) >= 3)
    except RunInterrupted:
        return [], "stopped"
    return [], "finished"


CASES: dict[str, Callable[[Path, Ranks | None], Case]] = {
    "whole": partial(runs, 5, "stored"),
    "fewer left": partial(runs, 7, "stored"),
    "enough left": partial(runs, 10, "stored"),
    "again": partial(runs, 10, "stored"),
    "in memory": partial(runs, 4, None),
    "grid": partial(grid, GRID, "grid"),
    "few": partial(grid, FEW, "few"),
    "grid in memory": partial(grid, GRID, None),
    "free": free,
    "rule": rule,
    "stopped run": stopped_run,
    "interrupted": partial(interrupted, None),
    "interrupted and stored": partial(interrupted, "interrupted"),
}


def work(folder: Path, group: Ranks) -> None:
    found = {name: case(folder, group) for name, case in CASES.items()}
    (folder / f"{group.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    codes = on_ranks(WORLD, joined, partial(work, Path(sys.argv[1])))
    assert codes == [0] * WORLD
