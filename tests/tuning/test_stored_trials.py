"""Trials are run folders without weights: shared by processes, found again, hidden from reports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.experiment import Experiment
from fedexp.options import Setup
from fedexp.plain import id_of
from fedexp.runs import find_runs, load_run
from fedexp.runs.folder import RunFolder
from fedexp.runs.spec import spec_text
from fedexp.tuning.grids import points
from fedexp.tuning.search import Search
from tests.helpers.tuning import OPTIONS, SMALL, StartedTrials, small_tune
from tests.tuning import sharing

GRID: Any = {"local.lr": [0.1, 0.01]}
TRIALS = Path("runs/trials")
COMMAND = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg", *OPTIONS]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_trial_has_rows_and_a_result_but_no_weights() -> None:
    tuning = small_tune(grid=GRID, rounds=30)
    for trial in tuning.trials:
        assert trial.folder is not None
        assert trial.folder == TRIALS / tuning.search.at(trial.point).id
        described = {"spec.toml", "fingerprint.json", "environment.json", ".lock"}
        assert names(trial.folder) == described | {"records.jsonl", "result.json"}
        assert len(load_run(trial.folder).rows) == 30


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_run_and_compare_find_a_finished_trial(algorithm: str) -> None:
    tuning = small_tune(algorithm, GRID, rounds=30)
    (best, other) = tuning.trials
    experiment = tuning.search.at(best.point)
    result = fx.run(experiment)
    assert result.folder == best.folder
    compared = fx.compare(
        "synthetic",
        [algorithm],
        rounds=30,
        evaluate_every=experiment.evaluate_every,
        options={**SMALL, **other.point},
    )
    assert [outcome.folder for outcome in compared.outcomes] == [other.folder]
    assert names(Path("runs")) == {"trials"}  # nothing was run


def test_the_model_of_a_trial_is_trained_by_a_restart() -> None:
    tuning = fx.tune("digits", "fedavg", {"local.lr": [0.1]}, rounds=3)
    experiment = tuning.search.at(tuning.best)
    with pytest.raises(UsageError, match=r"is a trial, which stores no weights; run it with rest"):
        fx.run(experiment).model()
    again = fx.run(experiment, restart=True)
    assert again.folder == Path("runs") / experiment.id
    assert isinstance(again.model(), nn.Module)
    assert fx.run(experiment).folder == again.folder


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_pruned_trial_is_marked_and_not_a_finished_run(jobs: int) -> None:
    how: Any = {"protocol": "free", "trials": 14, "rounds": 24, "jobs": jobs}
    tuning = fx.tune("digits", "fedavg", **how)
    assert len(tuning.trials) == 14
    assert not tuning.trials[0].result.pruned
    pruned = [trial for trial in tuning.trials if trial.result.pruned]
    assert pruned
    for trial in tuning.trials:
        assert trial.folder is not None
        result = json.loads((trial.folder / "result.json").read_text())
        assert (result["status"] == "pruned") == trial.result.pruned
        assert result["rounds"] == len(load_run(trial.folder).rows)
    again = fx.tune("digits", "fedavg", **how)
    assert again.trials == tuning.trials
    first = pruned[0]
    assert first.folder is not None
    shutil.copytree(first.folder, TRIALS / first.folder.name)  # as if it were of a grid
    result = fx.run(tuning.search.at(first.point))
    assert result.folder == Path("runs") / first.folder.name
    assert len(result.rows) == 24


def test_reports_leave_trials_out() -> None:
    tuning = small_tune(grid=GRID)
    small_tune(protocol="free", trials=2)
    run = fx.run("synthetic", "fedavg", rounds=2, options=SMALL)
    assert find_runs([Path("runs")]) == [run.folder]
    assert find_runs([Path()]) == [run.folder]
    assert len(find_runs([TRIALS])) == 4
    assert tuning.trials[0].folder is not None
    assert find_runs([tuning.trials[0].folder]) == [tuning.trials[0].folder]


def test_a_thousand_trials_are_listed_without_reading_their_specs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor all numbers of the rounds before the window: one run is resolved for all of them."""
    grid: Any = {"local.lr": [k / 1000 for k in range(1, 101)], "server.lr": list(range(1, 11))}
    (trial,) = small_tune(grid={"local.lr": [0.001], "server.lr": [1]}, rounds=50).trials
    assert trial.folder is not None
    search = Search.of(Experiment("synthetic", "fedavg", rounds=50, options=SMALL), grid)
    for spec in map(search.spec_at, points(search.values)[1:]):
        folder = TRIALS / id_of(spec)
        shutil.copytree(trial.folder, folder)
        (folder / "spec.toml").write_text(spec_text(spec))
    read: Counter[str] = Counter()
    open_file = Path.open

    def count(path: Path, *arguments: Any, **more: Any) -> Any:
        read[path.name] += 1
        return open_file(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", count)
    set_options = Setup.with_options

    def count_options(setup: Setup, options: Any) -> Setup:
        read["options"] += 1
        return set_options(setup, options)

    monkeypatch.setattr(Setup, "with_options", count_options)
    assert len(small_tune(grid=grid, rounds=50).trials) == 1000
    assert read["records.jsonl"] == read["result.json"] == 1000
    assert read["fingerprint.json"] == 1001  # they are the same bytes, compared once
    assert read["options"] < 200  # of the values of the grid, and of few runs
    with pytest.raises(UsageError, match="there is no run in runs"):
        find_runs([Path("runs")])
    assert read["spec.toml"] == 0


def test_trials_of_other_data_are_refused() -> None:
    data = fx.tasks.digits()
    first = fx.tune(data, "fedavg", GRID, rounds=3)
    data.train.fields["x"].mul_(2)
    with pytest.raises(UsageError, match=r"other content: .*\(x\) .*; remove runs/trials, or cho"):
        fx.tune(data, "fedavg", GRID, rounds=3)
    data.train.fields["x"].div_(2)
    assert fx.tune(data, "fedavg", GRID, rounds=3).trials == first.trials


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("records.jsonl", "{\n", "is damaged at line 1; remove .* to run the trial again"),
        ("records.jsonl", "", "has 0 of 12 rows; remove"),
        ("result.json", "7", "is damaged"),
        ("fingerprint.json", "{}", "is damaged; remove runs/trials, or choose another"),
    ],
)
def test_a_damaged_trial_is_named(name: str, text: str, message: str) -> None:
    (trial, _) = small_tune(grid=GRID).trials
    assert trial.folder is not None
    (trial.folder / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        small_tune(grid=GRID)


@pytest.mark.parametrize("protocol", ["paper", "free"])
def test_processes_share_a_search_and_take_over_from_a_killed_one(protocol: str) -> None:
    subprocess.run([sys.executable, sharing.__file__, protocol], check=True, timeout=300)
    started = [json.loads(Path(f"{k}.started").read_text()) for k in range(3)]
    found = [json.loads(Path(f"{k}.found").read_text()) for k in (1, 2)]
    assert found[0] == found[1]
    times = Counter(json.dumps(point) for process in started for point in process)
    abandoned = json.dumps(started[0][1])
    assert times.pop(abandoned) == 2
    assert set(times.values()) == {1}
    assert len(found[0]) == len(times) + 1 == sharing.TRIALS
    if protocol == "paper":
        alone = small_tune(grid=sharing.GRID, runs=None)
        assert [[trial.point, trial.result.score] for trial in alone.trials] == found[0]


def test_a_killed_search_with_workers_resumes() -> None:
    """SIGKILL with two workers: they exit as well; what was finished is not run again."""
    command = [*COMMAND, "--rounds", "60", "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while finished() < 4:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.02)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)
    before, started = finished(), StartedTrials()
    assert before < 20, "nothing was left to do"
    tuning = small_tune(rounds=60, on_round=started)
    assert len(started.points) == len(tuning.trials) - before == 20 - before
    whole = small_tune(rounds=60, runs=None)
    assert [t.result for t in whole.trials] == [t.result for t in tuning.trials]


def finished() -> int:
    return len(list(TRIALS.glob("*/result.json")))


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_the_wait_for_other_processes(jobs: str) -> None:
    """Both trials are locked by another process, which never runs them."""
    command = [*COMMAND, "--rounds", "4", "--jobs", jobs, "--grid", "local.lr=0.1,0.01"]
    base = Experiment("synthetic", "fedavg", rounds=4, options=SMALL)
    search = Search.of(base, GRID)
    trials = [search.at(point) for point in points(search.values)]
    held = [RunFolder.of(TRIALS / trial.id, trial) for trial in trials]
    with held[0], held[1]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert process.stderr.readline().endswith("in other processes; waiting for them\n")
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "fedexp: stopped; the same command continues"
    assert len(small_tune(grid=GRID, rounds=4).trials) == 2
