"""Whatever ends a job of ranks, the user reads one line; and only the first rank writes."""

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
KEPT = [*RUN, "--checkpoint-every", "0"]
JOBS: dict[str, list[object]] = {
    "whole": [3, "", *RUN, "--out", "whole", "--quiet"],
    "name": [2, "", "run", "synthetic", "--algorithm", "fedxp"],
    "option": [2, "", "run", "synthetic", "--rounds", "none"],
    "divergence": [2, "", *RUN, "--out", "diverged", "--set", "local.lr=1e6"],
    "stranger": [2, "", *RUN, "--out", "."],
    "device": [2, "", *RUN, "--device", "cuda:0"],
    "other": [2, "1:--seed=7", *RUN, "--out", "other"],
    "memory": [3, "1:memory", *KEPT, "--out", "memory"],
    "bug": [3, "2:bug", *KEPT, "--out", "bug"],
    "lost": [3, "1:lost", *KEPT, "--out", "lost"],
}


class Done(NamedTuple):
    """What a job said, and how its ranks ended."""

    stdout: list[str]
    stderr: list[str]
    codes: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    (made / "strange").touch()
    return made


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    """All jobs, one after another."""
    command = [sys.executable, launch.__file__, json.dumps(list(JOBS.values()))]
    found = finished(command, folder)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    jobs: dict[str, Done] = {}
    said: list[str] = []
    names = iter(JOBS)
    errors = iter(found.stderr.split(f"{launch.SEPARATOR}\n"))
    for line in found.stdout.splitlines():
        if line.startswith("["):
            # torch itself may have words about a store that has gone
            lines = [e for e in next(errors).splitlines() if e.startswith(("fedexp:", "round "))]
            jobs[next(names)] = Done(said, lines, json.loads(line))
            said = []
        else:
            said.append(line)
    return jobs


def test_only_the_first_rank_writes_and_prints(done: dict[str, Done], folder: Path) -> None:
    job = done["whole"]
    assert job.codes == [0, 0, 0]
    assert len(job.stdout) == 1
    assert len(job.stderr) == 6  # a line a round, and where it was written
    assert len((folder / "whole" / "records.jsonl").read_text().splitlines()) == 5
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ["name", "option", "divergence", "stranger"])
def test_what_all_ranks_find_wrong_is_told_as_a_lone_process_tells_it(
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


def test_a_gpu_is_not_shared(done: dict[str, Done]) -> None:
    (said,) = done["device"].stderr
    assert "each rank has a GPU of its own; say --device cuda" in said


def test_ranks_must_be_started_alike(done: dict[str, Done], folder: Path) -> None:
    (said,) = done["other"].stderr
    assert "rank 1 has run synthetic-fedexp-s7-" in said
    assert "but rank 0 has run synthetic-fedexp-s0-" in said
    assert done["other"].codes == [2, 2]
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("memory", "rank 1: out of memory"),
        ("bug", "rank 2: ValueError: something is wrong"),
        ("lost", "rank 1 ended without a word"),
    ],
)
def test_what_befalls_one_rank_is_told_once_and_ends_the_others(
    done: dict[str, Done], folder: Path, name: str, line: str
) -> None:
    (said,) = done[name].stderr
    assert line in said
    assert all(done[name].codes)
    assert len((folder / name / "records.jsonl").read_text().splitlines()) == 2
