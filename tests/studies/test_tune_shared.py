"""One study, many processes: no point twice, none lost with a killed process, one best."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedexp.tune.grids import points
from fedexp.tune.ledger import Claims
from fedexp.tune.search import tune
from tests.studies import sharers
from tests.studies.problems import SMALL, small_study


@pytest.mark.parametrize("protocol", ["paper", "free"])
def test_processes_share_a_study_and_take_over_from_a_killed_one(
    protocol: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.db"
    subprocess.run([sys.executable, sharers.__file__, str(path), protocol], check=True, timeout=300)
    begun = [json.loads((tmp_path / f"{k}.begun").read_text()) for k in range(3)]
    found = [json.loads((tmp_path / f"{k}.found").read_text()) for k in (1, 2)]
    assert found[0] == found[1]
    times = Counter(json.dumps(point) for own in begun for point in own)
    lost = json.dumps(begun[0][1])
    assert times.pop(lost) == 2
    assert set(times.values()) == {1}
    assert len(found[0]) == len(times) + 1 == sharers.TRIALS
    if protocol == "paper":
        assert sorted(str(point) for point, _ in found[0]) == sorted(map(str, points(sharers.GRID)))
        alone = tune(small_study(tmp_path / "alone.db", values=sharers.GRID))
        assert [[each.point, each.scored.score] for each in alone] == found[0]
    assert not list(tmp_path.glob("*claims*"))


def test_a_claim_is_one_processes_until_it_is_given_back(tmp_path: Path) -> None:
    one, two = Claims(tmp_path / "s.db"), Claims(tmp_path / "s.db")
    assert one.take("a")
    assert not one.take("a")
    assert not two.take("a")
    assert two.take("b")
    one.release("a")
    assert two.take("a")
    two.close()
    assert one.take("a")
    assert one.take("b")
    one.close()
    assert [path.name for path in tmp_path.iterdir()] == [".s.db.lock"]


def test_ctrl_c_ends_the_waiting_for_others(tmp_path: Path) -> None:
    """The only trial is with another process, which never gets on with it."""
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)}, rounds=4)
    options = [word for pair in SMALL.items() for word in ("--set", "=".join(pair))]
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "4", "--grid", "local.lr=0.1", "--study", str(study.path), *options]
    with study.opened() as ledger:
        assert ledger.claim(0)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        assert process.stderr is not None
        assert process.stderr.readline().endswith("with other processes; waiting\n")
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "fedexp: stopped; the same command continues"
    assert len(tune(study)) == 1
