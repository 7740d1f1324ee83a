"""Several processes tune one study: every trial runs once, also if a process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedexp.tuning.grids import points
from fedexp.tuning.search import tune
from tests.helpers.tuning import OPTIONS, small_study
from tests.tuning import shared_study


@pytest.mark.parametrize("protocol", ["paper", "free"])
def test_processes_share_a_study_and_take_over_from_a_killed_one(
    protocol: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.db"
    command = [sys.executable, shared_study.__file__, str(path), protocol]
    subprocess.run(command, check=True, timeout=300)
    started = [json.loads((tmp_path / f"{k}.started").read_text()) for k in range(3)]
    found = [json.loads((tmp_path / f"{k}.found").read_text()) for k in (1, 2)]
    assert found[0] == found[1]
    times = Counter(json.dumps(point) for own in started for point in own)
    abandoned = json.dumps(started[0][1])
    assert times.pop(abandoned) == 2
    assert set(times.values()) == {1}
    assert len(found[0]) == len(times) + 1 == shared_study.TRIALS
    if protocol == "paper":
        grid = shared_study.GRID
        assert sorted(str(point) for point, _ in found[0]) == sorted(map(str, points(grid)))
        alone = tune(small_study(tmp_path / "alone.db", values=grid))
        assert [[each.point, each.result.score] for each in alone] == found[0]
    assert not list(tmp_path.glob("*claims*"))


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_the_wait_for_other_processes(jobs: str, tmp_path: Path) -> None:
    """All trials are locked by another process, which never runs them."""
    values = {"local.lr": (0.1, 0.01)}
    study = small_study(tmp_path / "s.db", values=values, rounds=4)
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "4", "--grid", "local.lr=0.1,0.01", "--study", str(study.path)]
    command += ["--jobs", jobs, *OPTIONS]
    with study.open() as store:
        assert all(store.acquire(number) for number in range(2))
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        assert process.stderr is not None
        assert process.stderr.readline().endswith("in other processes; waiting for them\n")
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "fedexp: stopped; the same command continues"
    assert len(tune(study)) == 2
