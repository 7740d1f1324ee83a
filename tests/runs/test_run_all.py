"""The runs of a comparison: in one process or several, and the tasks they are built from."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import fedexp as fx
from fedexp.catalogue import build_task
from fedexp.experiment import Experiment
from fedexp.runs.pool import run_all
from fedexp.runs.workers import Execution, Executor
from fedexp.tasks import Task
from tests.runs.helpers import TINY, essence, untimed

FEW = {"task.clients": 6, "local.steps": 3}


def test_processes_give_the_same_rows_in_the_same_order() -> None:
    pairs = product(("fedexp", "scaffold"), (0, 1))
    experiments = [Experiment("synthetic", name, seed, 3, options=TINY) for name, seed in pairs]
    seen: list[tuple[Experiment, int]] = []
    one = run_all(experiments)
    two = run_all(experiments, 2, lambda experiment, row: seen.append((experiment, row["round"])))
    assert [outcome.spec for outcome in two] == [experiment.spec for experiment in experiments]
    assert [untimed(outcome.rows) for outcome in one] == [untimed(other.rows) for other in two]
    assert sorted(seen, key=str) == sorted(
        [(experiment, round) for experiment in experiments for round in (1, 2, 3)], key=str
    )


@pytest.mark.parametrize("algorithms", [("fedexp", "nothing"), ("nothing", "fedexp")], ids=str)
def test_a_failing_run_stops_the_rest_at_once(algorithms: tuple[str, ...]) -> None:
    experiments = [Experiment("synthetic", name, rounds=5000) for name in algorithms]
    seen: list[int] = []
    with pytest.raises(fx.UsageError, match="unknown algorithm"):
        run_all(experiments, 2, lambda experiment, row: seen.append(row["round"]))
    assert 5000 not in seen


def test_seeds_change_the_data() -> None:
    zero, one = (build_task("synthetic", {"dim": "20"}, seed) for seed in (0, 1))
    assert not np.array_equal(zero.train.fields["x"], one.train.fields["x"])
    fixed = build_task("synthetic", {"dim": "20", "seed": "0"}, 1)
    assert np.array_equal(zero.train.fields["x"], fixed.train.fields["x"])


def test_unknown_task_options_are_refused() -> None:
    with pytest.raises(fx.UsageError, match=r"did you mean task\.clients"):
        build_task("synthetic", {"client": "3"})


def comparison(task: str, options: Mapping[str, Any], **more: Any) -> list[Experiment]:
    """Return two seeds of four algorithms, whose rules have other states and other programs."""
    return [
        Experiment(task, algorithm, seed, 3, options=options, **more)
        for algorithm in ("fedavg", "fedexp", "scaffold", "fedadam")
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("task", "engine", "jobs"),
    [
        ("synthetic", "auto", 1),
        ("synthetic", "batched", 2),
        ("digits-mlp", "auto", 2),
        ("digits-mlp", "batched", 1),
        ("digits-mlp", "threads", 1),
        ("digits-mlp", "loop", 1),
    ],
)
def test_runs_that_share_a_process_store_what_they_store_alone(
    task: str, engine: Any, jobs: int, tmp_path: Path
) -> None:
    small = TINY if task == "synthetic" else FEW
    experiments = comparison(task, small, cohort=3, engine=engine)
    _ = experiments[0].resolved
    run_all(experiments, jobs, root=tmp_path / "shared")
    for experiment in experiments:
        run_all([experiment.replace()], root=tmp_path / "alone")
        folder = experiment.id
        assert essence(tmp_path / "shared" / folder) == essence(tmp_path / "alone" / folder)
        one, other = (
            (tmp_path / where / folder / "fingerprint.json").read_text()
            for where in ("shared", "alone")
        )
        assert one == other


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The seeds that tasks are built with, and how many of the tasks before are still in memory."""
    builds: list[tuple[int, int]] = []
    tasks = WeakSet[Task]()

    def noted(name: str, options: Any, seed: int, *rest: Any) -> Task:
        builds.append((seed, len(tasks)))
        tasks.add(task := build_task(name, options, seed, *rest))
        return task

    monkeypatch.setattr(sys.modules["fedexp.catalogue"], "build_task", noted)
    gc.disable()  # data are freed with the last reference to them
    yield builds
    gc.enable()


def test_a_task_is_built_once_for_all_algorithms(built: list[tuple[int, int]]) -> None:
    """The task of one seed is freed before that of the next is built."""
    run_all(comparison("synthetic", TINY))
    assert built == [(0, 0), (1, 0)]
    built.clear()
    experiments = comparison("synthetic", TINY)
    _ = experiments[0].resolved
    run_all(experiments)
    assert built == [(0, 0), (1, 1)]  # that of the caller's run is in use


def test_a_task_that_does_not_depend_on_the_seed_is_built_once(
    built: list[tuple[int, int]],
) -> None:
    run_all(comparison("synthetic", {**TINY, "task.seed": 5}))
    assert built == [(0, 0)]
    built.clear()
    run_all(comparison("toy", {"task.start": "3,4"}))
    assert built == [(0, 0)]


def test_tasks_are_equal_by_factory_and_seed() -> None:
    experiment = Experiment("synthetic", "fedexp", options=TINY)
    key = experiment.task_key
    assert experiment.replace(algorithm="fedavg", rounds=7).task_key == key
    assert (
        experiment.replace(options={name: int(text) for name, text in TINY.items()}).task_key == key
    )
    for other in (
        experiment.replace(seed=1),
        experiment.replace(mode="authors-code"),
        experiment.replace(options={"task.clients": 4}),
        Experiment("digits", "fedexp"),
    ):
        assert other.task_key != key
    assert experiment.replace(seed=1).task_key.factory == key.factory


def test_an_engine_is_tried_once_per_client_rule_and_task() -> None:
    run = Executor(Execution())
    for experiment in comparison("digits-mlp", FEW, cohort=3):
        run(experiment, lambda row: True, lambda: False)
    assert run.programs.trials == 2  # SGD and SCAFFOLD
    for experiment in comparison("synthetic", TINY):
        run(experiment, lambda row: True, lambda: False)
    assert run.programs.trials == 4
