"""The soak tool: what it draws, what it damages, and what it accepts."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tools import soak
from tools.soak_attempt import Failure, count_rows, damage, describe, processes_under

ALGORITHMS = ["fedavg", "fedexp", "fedprox", "scaffold", "scaffold-exp", "fedadam"]
LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


def test_damage_changes_one_file_of_an_unfinished_run(tmp_path: Path) -> None:
    for name in ("over/result.json", "over/records.jsonl", "run/records.jsonl", "run/spec.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0123456789\n")
    for seed in range(30):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        found = damage(tmp_path, random.Random(seed))
        assert found is not None
        changed = [path for path, data in before.items() if path.read_bytes() != data]
        assert changed == [found[0]]
        assert found[0].parent.name == "run"
        found[0].write_bytes(before[found[0]])
    assert count_rows(tmp_path) == 2


def test_outcomes_are_compared_to_the_bit_or_to_a_tolerance() -> None:
    wanted = {"rows": [{"loss": 1.0}], "model": b"ab"}
    soak.check_outcome(wanted, wanted, 0.0)
    near = {"rows": [{"loss": 1.0 + 1e-9}], "model": b"ab"}
    soak.check_outcome(near, wanted, 0.01)
    with pytest.raises(Failure, match=r"/rows\[0\]/loss"):
        soak.check_outcome(near, wanted, 0.0)
    with pytest.raises(Failure, match="/model"):
        soak.check_outcome({**wanted, "model": b"aB"}, wanted, math.inf)
    with pytest.raises(Failure, match="/rows"):
        soak.check_outcome({**wanted, "rows": []}, wanted, 0.01)


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (0, "Traceback (most recent call last):\n  File fedexp/cli/main.py\nValueError: x\n"),
        (1, "fedexp: error: first\nfedexp: error: second\n"),
        (1, "no line of error\n"),
    ],
)
def test_an_error_is_one_line(status: int, output: str) -> None:
    case = soak.draw_case(0, 7, ALGORITHMS, ["run"])
    soak.check_output(case, 1, "fedexp: error: no such task\n")
    with pytest.raises(Failure):
        soak.check_output(case, status, output)


@LINUX
def test_processes_are_found_and_described() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "RANK": "1"}) as child:
        assert child.pid in processes_under([os.getpid()])
        assert describe(child.pid).startswith("RANK=1 in ")
        child.kill()
    assert child.pid not in processes_under([os.getpid()])
    assert describe(child.pid) == "ended"
