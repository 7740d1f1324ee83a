"""A failed job of several ranks prints one error line, and only rank 0 writes files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from fedexp.cli.main import main
from tests.cli.helpers import SMALL
from tests.distributed import launch
from tests.helpers.processes import finished

RUN = ["run", "synthetic", "--rounds", "5", *SMALL]
STORED = [*RUN, "--checkpoint-every", "0"]
JOBS: dict[str, list[object]] = {
    "whole": [3, "", *RUN, "--out", "whole", "--quiet"],
    "name": [2, "", "run", "synthetic", "--algorithm", "fedxp"],
    "option": [2, "", "run", "synthetic", "--rounds", "none"],
    "divergence": [2, "", *RUN, "--out", "diverged", "--set", "local.lr=1e6"],
    "foreign-folder": [2, "", *RUN, "--out", "."],
    "device": [2, "", *RUN, "--device", "cuda:0"],
    "other": [2, "1:--seed=7", *RUN, "--out", "other"],
    "memory": [3, "1:memory", *STORED, "--out", "memory"],
    "bug": [3, "2:bug", *STORED, "--out", "bug"],
    "lost": [3, "1:lost", *STORED, "--out", "lost"],
}


class Done(NamedTuple):
    """The output of a job, and the exit codes of its ranks."""

    stdout: list[str]
    stderr: list[str]
    codes: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    (made / "foreign").touch()
    return made


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    """All jobs, one after another."""
    command = [sys.executable, launch.__file__, json.dumps(list(JOBS.values()))]
    found = finished(command, folder)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    jobs: dict[str, Done] = {}
    stdout: list[str] = []
    names = iter(JOBS)
    errors = iter(found.stderr.split(f"{launch.SEPARATOR}\n"))
    for line in found.stdout.splitlines():
        if line.startswith("["):
            # torch may log lines of its own about a closed store
            lines = [e for e in next(errors).splitlines() if e.startswith(("fedexp:", "round "))]
            jobs[next(names)] = Done(stdout, lines, json.loads(line))
            stdout = []
        else:
            stdout.append(line)
    return jobs


def test_only_the_first_rank_writes_and_prints(done: dict[str, Done], folder: Path) -> None:
    job = done["whole"]
    assert job.codes == [0, 0, 0]
    assert len(job.stdout) == 1
    assert len(job.stderr) == 6  # one line per round, and the run folder
    assert len((folder / "whole" / "records.jsonl").read_text().splitlines()) == 5
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ["name", "option", "divergence", "foreign-folder"])
def test_an_error_of_all_ranks_is_reported_as_by_a_single_process(
    done: dict[str, Done],
    folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    status = main([str(word) for word in JOBS[name][2:]])
    assert status
    assert done[name].codes == [status, status]
    assert done[name].stderr == capsys.readouterr().err.splitlines()


def test_ranks_do_not_share_a_gpu(done: dict[str, Done]) -> None:
    (line,) = done["device"].stderr
    assert "every rank uses a different GPU; use --device cuda" in line


def test_ranks_need_the_same_command(done: dict[str, Done], folder: Path) -> None:
    (line,) = done["other"].stderr
    assert "rank 1 has run synthetic-fedexp-s7-" in line
    assert "but rank 0 has run synthetic-fedexp-s0-" in line
    assert done["other"].codes == [2, 2]
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory", "rank 1: out of memory"),
        ("bug", "rank 2: ValueError: something is wrong"),
        ("lost", "rank 1 died without an error message"),
    ],
)
def test_a_failure_of_one_rank_is_reported_once_and_ends_the_job(
    done: dict[str, Done], folder: Path, name: str, message: str
) -> None:
    (line,) = done[name].stderr
    assert message in line
    assert all(done[name].codes)
    assert len((folder / name / "records.jsonl").read_text().splitlines()) == 2
