"""Many runs: shares of an array job, worker processes, and runs that are stopped one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedexp.errors import FedExPError, UsageError
from fedexp.runs import RunInterrupted, find_runs, load_run, run_all, run_id
from fedexp.runs.files import Row
from fedexp.runs.folder import BusyError, RunFolder
from fedexp.runs.pool import Shard, parse_shard, run_queue
from fedexp.runs.spec import Outcome, Run, Spec
from fedexp.runs.workers import Execution, Job, Result
from fedexp.tasks import Task
from tests.runs.helpers import nobody, tiny, untimed

LONG = 100_000  # rounds, of a run that has to be stopped


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 7))
def test_every_item_is_in_one_share_and_shares_are_even(items: int, count: int, alike: int) -> None:
    """Also within each kind, if items of a kind are neighbours."""
    listed = list(range(items))
    shares = [Shard(index, count).of(listed) for index in range(1, count + 1)]
    assert sorted(item for share in shares for item in share) == listed
    for kind in {item // alike for item in listed}:
        sizes = [sum(item // alike == kind for item in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "/2", "-1/2", "1/0", "a/b", "1/2/3", ""])
def test_a_share_that_does_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="--shard takes i/n with i from 1 to n"):
        parse_shard(text)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_of_another_process_is_skipped(jobs: int, tmp_path: Path) -> None:
    specs = [tiny(seed=seed) for seed in range(3)]
    run = specs[1].prepare()
    skipped: list[Spec] = []
    with RunFolder.of(tmp_path / run_id(run), run):
        outcomes = run_all(specs, jobs, nobody, tmp_path, on_busy=skipped.append)
        with pytest.raises(BusyError, match="another process is working on"):
            run_all(specs[1:], jobs, nobody, tmp_path)
    assert [outcome.spec for outcome in outcomes] == [specs[0], specs[2]]
    assert skipped == [specs[1]]
    assert [len(each.rows) for each in run_all(specs, 1, nobody, tmp_path)] == [6, 6, 6]


class Listed:
    """A queue of specs that stops those of seed 1 after round 3; records what it is called with."""

    def __init__(self, specs: list[Spec]) -> None:
        self.left = [Job(spec.seed, spec) for spec in specs]
        self.rows: dict[int, list[Row]] = {spec.seed: [] for spec in specs}
        self.results: dict[int, Result] = {}

    def take(self) -> Job | None:
        return self.left.pop(0) if self.left else None

    def is_done(self) -> bool:
        return not self.left

    def on_round(self, job: Job, row: Row) -> bool:
        self.rows[job.key].append(row)
        return not (job.key == 1 and row["round"] == 3)

    def on_result(self, job: Job, result: Result) -> None:
        self.results[job.key] = result


@pytest.mark.parametrize(("jobs", "stored"), [(1, False), (1, True), (2, True)])
def test_a_queue_stops_one_run_and_continues_with_the_others(
    jobs: int, stored: bool, tmp_path: Path
) -> None:
    specs = [tiny(seed=seed, rounds=LONG if seed == 1 else 6) for seed in range(3)]
    queue = Listed(specs)
    run_queue(queue, len(specs), jobs, Execution(root=tmp_path if stored else None))
    assert queue.results[1] == "stopped"
    assert len(queue.rows[1]) == 3  # none after the request
    for seed in (0, 2):
        outcome = queue.results[seed]
        assert isinstance(outcome, Outcome)
        (alone,) = run_all([specs[seed]], 1, nobody)
        assert untimed(outcome.rows) == untimed(queue.rows[seed]) == untimed(alone.rows)
    assert len(list(tmp_path.iterdir())) == (3 if stored else 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_request_to_stop_ends_all_runs_after_a_round(jobs: int, tmp_path: Path) -> None:
    specs = [tiny(seed=seed, rounds=LONG) for seed in range(3)]
    seen: list[int] = []
    with pytest.raises(RunInterrupted):
        run_all(
            specs,
            jobs,
            lambda spec, row: seen.append(row["round"]),
            tmp_path,
            stop=lambda: max(seen, default=0) >= 3,
        )
    started = [load_run(folder) for folder in find_runs([tmp_path])]
    assert len(started) == jobs
    assert all(run.result is None and run.rows for run in started)


def kill_worker(spec: Spec, task: Task) -> Run:
    os.kill(os.getpid(), signal.SIGKILL)
    return spec.prepare(task)


class CannotBePickledError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def fail(spec: Spec, task: Task) -> Run:
    raise CannotBePickledError("something", "is wrong")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [(kill_worker, "a worker process died"), (fail, "CannotBePickledError: something is wrong")],
)
def test_a_worker_that_fails_or_dies_ends_all_runs(
    prepare: Callable[[Spec, Task], Run], message: str
) -> None:
    queue = Listed([tiny(seed=seed, rounds=LONG) for seed in range(3)])
    with pytest.raises(FedExPError, match=message):
        run_queue(queue, 3, 2, Execution(prepare))
