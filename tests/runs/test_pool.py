"""Many runs: shares of an array job, worker processes, and runs that are stopped one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedexp.errors import FedExPError, UsageError
from fedexp.experiment import Experiment, Row
from fedexp.runs import RunInterrupted, find_runs, folder_of, load_run, run_all
from fedexp.runs.folder import BusyError, RunFolder
from fedexp.runs.pool import Shard, parse_shard, run_queue
from fedexp.runs.spec import Outcome
from fedexp.runs.workers import Execution, Job, Result
from tests.helpers.own_study import write_study
from tests.runs.helpers import tiny, untimed

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
    experiments = [tiny(seed=seed) for seed in range(3)]
    busy = experiments[1]
    skipped: list[Experiment] = []
    with RunFolder.of(folder_of(busy, tmp_path), busy):
        outcomes = run_all(experiments, jobs, root=tmp_path, on_busy=skipped.append)
        with pytest.raises(BusyError, match="another process is working on"):
            run_all(experiments[1:], jobs, root=tmp_path)
    assert [outcome.seed for outcome in outcomes] == [0, 2]
    assert skipped == [busy]
    assert [len(outcome.rows) for outcome in run_all(experiments, root=tmp_path)] == [6, 6, 6]


class Listed:
    """A queue of runs that stops those of seed 1 after round 3; records what it is called with."""

    def __init__(self, experiments: list[Experiment]) -> None:
        self.left = [Job(experiment.seed, experiment) for experiment in experiments]
        self.references = [text for experiment in experiments for text in experiment.references]
        self.rows: dict[int, list[Row]] = {experiment.seed: [] for experiment in experiments}
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
    experiments = [tiny(seed=seed, rounds=LONG if seed == 1 else 6) for seed in range(3)]
    queue = Listed(experiments)
    run_queue(queue, len(experiments), jobs, Execution(tmp_path if stored else None))
    assert queue.results[1] == "stopped"
    assert len(queue.rows[1]) == 3  # none after the request
    for seed in (0, 2):
        outcome = queue.results[seed]
        assert isinstance(outcome, Outcome)
        (alone,) = run_all([experiments[seed]])
        assert untimed(outcome.rows) == untimed(queue.rows[seed]) == untimed(alone.rows)
    assert len(list(tmp_path.iterdir())) == (3 if stored else 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_request_to_stop_ends_all_runs_after_a_round(jobs: int, tmp_path: Path) -> None:
    experiments = [tiny(seed=seed, rounds=LONG) for seed in range(3)]
    seen: list[int] = []
    with pytest.raises(RunInterrupted):
        run_all(
            experiments,
            jobs,
            lambda experiment, row: seen.append(row["round"]),
            tmp_path,
            stop=lambda: max(seen, default=0) >= 3,
        )
    started = [load_run(folder) for folder in find_runs([tmp_path])]
    assert len(started) == jobs
    assert all(run.result is None and run.rows for run in started)


FAULTS = """
import multiprocessing, os, signal

class CannotBePickledError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

def die(rng, round, federation):
    if multiprocessing.parent_process():
        os.kill(os.getpid(), signal.SIGKILL)

def fail(rng, round, federation):
    raise CannotBePickledError("something", "is wrong")
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [("die", "a worker process died"), ("fail", "CannotBePickledError: something is wrong")],
)
def test_a_worker_that_fails_or_dies_ends_all_runs(
    fault: str, message: str, tmp_path: Path
) -> None:
    cohort = f"{write_study(tmp_path, FAULTS)}:{fault}"
    queue = Listed([tiny(seed=seed, rounds=LONG, cohort=cohort) for seed in range(3)])
    with pytest.raises(FedExPError, match=message):
        run_queue(queue, 3, 2, Execution())
