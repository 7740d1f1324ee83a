"""Searches resume after they were killed or interrupted: no trial is lost, none repeated."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedexp.errors import UsageError
from fedexp.runs import RunInterrupted
from fedexp.tune.grids import Point, points
from fedexp.tune.search import Study, TrialRunner, tune
from tests.helpers.tuning import OPTIONS, StartedTrials, small_study


def stored_points(study: Study) -> list[Point]:
    with study.open() as store:
        return [each.point for each in store.trials()]


def test_every_point_of_a_grid_is_tried_once(tmp_path: Path) -> None:
    values = {"server.lr": (1.0, 10.0), "local.lr": (0.1, 0.01, 5.0)}
    study = small_study(tmp_path / "with space" / "s.db", values=values, rounds=30)
    first, second = StartedTrials(), StartedTrials()
    trials = tune(study, TrialRunner(progress=first))
    assert first.points == points(study.values)
    assert tune(study, TrialRunner(progress=second)) == trials
    assert second.points == []
    scores = [each.result.score for each in trials]
    assert scores == sorted(scores)
    assert trials[0].point in points(study.values)
    assert [each.result.diverged_at is None for each in trials] == [True] * 4 + [False] * 2


def test_workers_give_the_scores_of_one_process(tmp_path: Path) -> None:
    """Bit for bit, for every result of a grid; and diverged trials are no error."""
    values = {"server.lr": (1.0, 10.0), "local.lr": (0.1, 0.01, 5.0)}
    one, two = (small_study(tmp_path / f"{k}.db", values=values, rounds=30) for k in (1, 2))
    started = StartedTrials()
    assert tune(one) == tune(two, TrialRunner(jobs=2, progress=started))
    assert sorted(map(str, started.points)) == sorted(map(str, points(values)))


def test_a_killed_grid_search_resumes(tmp_path: Path) -> None:
    """SIGKILL with two workers: they exit as well; every point is there once, the best the same."""
    study = small_study(tmp_path / "killed.db", rounds=60)
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "60", "--jobs", "2", "--study", str(study.path), *OPTIONS]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while _stored(study.path) < 4:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.02)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _stored(study.path)
    assert before < study.size, "nothing was left to do"
    started = StartedTrials()
    trials = tune(study, TrialRunner(progress=started))
    assert started.left == len(started.points) == study.size - before
    assert sorted(map(str, stored_points(study))) == sorted(map(str, points(study.values)))
    assert tune(replace(study, path=tmp_path / "whole.db")) == trials
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def _stored(path: Path) -> int:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            query = "select count(*) from trials where state = 'COMPLETE'"
            return int(database.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # not created yet


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_an_interrupted_free_search_repeats_the_trial_it_was_in(tmp_path: Path) -> None:
    ranges = {"server.lr": (1.0, 30.0), "local.lr": (0.01, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=8)
    interrupted, again = StartedTrials(interrupt_in_trial=3), StartedTrials()
    with pytest.raises(KeyboardInterrupt):
        tune(study, TrialRunner(progress=interrupted))
    assert len(stored_points(study)) == 2
    trials = tune(study, TrialRunner(progress=again))
    assert again.points[0] == interrupted.points[-1]
    assert len(trials) == 8
    assert len({str(each.point) for each in trials}) == 8
    assert interrupted.points[0] == {
        "server.lr": 10.0,
        "local.lr": 0.1,
    }  # the task's own come first
    more = tune(replace(study, trials=10), TrialRunner(progress=again))
    assert len(more) == 10


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_free_search_prunes(jobs: int, tmp_path: Path) -> None:
    ranges = {"server.lr": (0.003, 30.0), "local.lr": (0.001, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=16, rounds=24)
    trials = tune(study, TrialRunner(jobs))
    assert len(trials) == 16
    assert any(each.result.pruned for each in trials)
    assert not trials[0].result.pruned
    for each in trials:
        assert 0.003 <= each.point["server.lr"] <= 30
        assert 0.001 <= each.point["local.lr"] <= 0.1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_request_to_stop_ends_the_search_after_the_round(jobs: int, tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1, 0.01)}, rounds=400)
    started = StartedTrials()
    runner = TrialRunner(jobs, progress=started, stop=lambda: bool(started.points))
    with pytest.raises(RunInterrupted):
        tune(study, runner)
    with study.open() as store:
        assert store.trials() == []
    assert len(tune(replace(study, path=tmp_path / "t.db"), TrialRunner(jobs))) == 2


def test_an_error_in_a_worker_ends_the_search(tmp_path: Path) -> None:
    """A spec that cannot be built in the worker raises its own error in the parent."""
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1, 0.01)})
    wrong = replace(study.run.spec, options=(*study.run.spec.options, ("task.clients", "none")))
    broken = replace(study, run=replace(study.run, spec=wrong))
    with pytest.raises(UsageError, match=r"task\.clients must be a whole number"):
        tune(broken, TrialRunner(jobs=2))
