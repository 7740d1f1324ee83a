"""The runs of a comparison: in one process or several, and the tasks they are built from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedexp as fx
from fedexp.options import build_task
from fedexp.runs import run_id, workers
from fedexp.runs.pool import run_all, run_queue
from fedexp.runs.spec import Outcome, Spec
from fedexp.runs.workers import Execution, Executor, Job, TaskKey
from fedexp.tasks import Task
from tests.runs.helpers import essence, nobody

SMALL = (("task.clients", "4"), ("task.rows", "3"), ("task.dim", "20"))


def untimed(outcome: Outcome) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in outcome.rows]


def test_processes_give_the_same_rows_in_the_same_order() -> None:
    specs = [
        Spec("synthetic", a, s, 3, options=SMALL) for a in ("fedexp", "scaffold") for s in (0, 1)
    ]
    seen: list[tuple[Spec, int]] = []
    one = run_all(specs, 1, lambda spec, row: None)
    two = run_all(specs, 2, lambda spec, row: seen.append((spec, row["round"])))
    assert [o.spec for o in two] == specs
    assert [untimed(o) for o in one] == [untimed(o) for o in two]
    assert sorted(seen, key=str) == sorted(
        [(spec, r) for spec in specs for r in (1, 2, 3)], key=str
    )


def test_a_failing_run_stops_the_rest_at_once() -> None:
    specs = [Spec("synthetic", name, rounds=5000) for name in ("fedexp", "nothing")]
    seen: list[int] = []
    with pytest.raises(fx.UsageError, match="unknown algorithm"):
        run_all(specs, 2, lambda spec, row: seen.append(row["round"]))
    assert 5000 not in seen


def test_seeds_change_the_data() -> None:
    zero, one = (build_task("synthetic", {"dim": "20"}, seed) for seed in (0, 1))
    assert not np.array_equal(zero.train.fields["x"], one.train.fields["x"])
    fixed = build_task("synthetic", {"dim": "20", "seed": "0"}, 1)
    assert np.array_equal(zero.train.fields["x"], fixed.train.fields["x"])


def test_unknown_task_options_are_refused() -> None:
    with pytest.raises(fx.UsageError, match=r"did you mean task\.clients"):
        build_task("synthetic", {"client": "3"})


def comparison(task: str, options: tuple[tuple[str, str], ...], **more: Any) -> list[Spec]:
    """Return two seeds of four algorithms, whose rules have other states and other programs."""
    return [
        Spec(task, algorithm, seed, 3, options=options, **more)
        for algorithm in ("fedavg", "fedexp", "scaffold", "fedadam")
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("task", "engine", "jobs"),
    [
        ("synthetic", "auto", 1),
        ("synthetic", "batched", 1),
        ("digits-mlp", "auto", 2),
        ("digits-mlp", "batched", 1),
        ("digits-mlp", "threads", 1),
        ("digits-mlp", "loop", 1),
    ],
)
def test_runs_that_share_a_process_store_what_they_store_alone(
    task: str, engine: Any, jobs: int, tmp_path: Path
) -> None:
    small = SMALL if task == "synthetic" else (("task.clients", "6"), ("local.steps", "3"))
    specs = comparison(task, small, cohort=3, engine=engine)
    run_all(specs, jobs, nobody, tmp_path / "shared", built=specs[0].prepare())
    for spec in specs:
        run_all([spec], 1, nobody, tmp_path / "alone")
        folder = run_id(spec.prepare())
        assert essence(tmp_path / "shared" / folder) == essence(tmp_path / "alone" / folder)
        one, other = (
            (tmp_path / where / folder / "fingerprint.json").read_text()
            for where in ("shared", "alone")
        )
        assert one == other


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that tasks are built with."""
    seeds: list[int] = []

    def noted(name: str, options: Any, seed: int, *rest: Any) -> Task:
        seeds.append(seed)
        return build_task(name, options, seed, *rest)

    monkeypatch.setattr(workers, "build_task", noted)
    return seeds


def test_a_task_is_built_once_for_all_algorithms(built: list[int]) -> None:
    specs = comparison("synthetic", SMALL)
    assert [outcome.spec for outcome in run_all(specs, 1, nobody)] == specs
    assert built == [0, 1]
    built.clear()
    run_all(specs, 1, nobody, built=specs[0].prepare())
    assert built == [1]


def test_a_task_that_does_not_depend_on_the_seed_is_built_once(built: list[int]) -> None:
    fixed = (*SMALL, ("task.seed", "5"))
    run_all(comparison("synthetic", fixed), 1, nobody)
    assert built == [0]
    built.clear()
    run_all([replace(spec, options=()) for spec in comparison("toy", ())], 1, nobody)
    assert built == [0]


def test_tasks_are_equal_by_factory_and_seed() -> None:
    spec = Spec("synthetic", "fedexp", options=SMALL)
    assert TaskKey.of(spec) == TaskKey.of(replace(spec, algorithm="fedavg", rounds=7))
    for other in (
        replace(spec, seed=1),
        replace(spec, mode="authors-code"),
        replace(spec, options=SMALL[:2]),
        Spec("digits", "fedexp"),
    ):
        assert TaskKey.of(spec) != TaskKey.of(other)
    assert TaskKey.of(spec).factory == TaskKey.of(replace(spec, seed=1)).factory


class Listed:
    """A queue of specs."""

    def __init__(self, specs: list[Spec]) -> None:
        self.left = [Job(k, spec) for k, spec in enumerate(specs)]

    def take(self) -> Job | None:
        return self.left.pop(0) if self.left else None

    def is_done(self) -> bool:
        return not self.left

    def on_round(self, job: Job, row: dict[str, Any]) -> bool:
        return True

    def on_result(self, job: Job, result: Any) -> None: ...


def test_an_engine_is_tried_once_per_client_rule_and_task() -> None:
    executor = Executor(Execution())
    specs = comparison("digits-mlp", (("task.clients", "6"), ("local.steps", "3")), cohort=3)
    run_queue(Listed(specs), len(specs), 1, Execution(), executor=executor)
    assert executor.programs.trials == 2  # SGD and SCAFFOLD
    run_queue(Listed(comparison("synthetic", SMALL)), 8, 1, Execution(), executor=executor)
    assert executor.programs.trials == 4
