"""Job arrays: `--shard i/n` runs a share, and the last to end shows the table of all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fedexp.cli.main import main
from fedexp.runs import find_runs, load_run
from tests.cli.helpers import FEDEXP, SMALL

pytestmark = pytest.mark.usefixtures("elsewhere")
COMPARE = ["compare", "synthetic", "--algorithms", "fedavg,fedexp,scaffold", "--seeds", "3"]
COMPARE += ["--rounds", "4", "--jobs", "1", *SMALL]


def test_the_last_shard_shows_what_one_command_would(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--runs", "alone", "--out", "alone.png"]) == 0
    alone = capfd.readouterr().out
    for index, missing in {4: 7, 2: 5, 1: 2}.items():
        assert main([*COMPARE, "--shard", f"{index}/4"]) == 0
        out, err = capfd.readouterr()
        first, last = err.splitlines()
        assert out == ""
        assert first.startswith(f"fedexp: shard {index}/4: ")
        assert f"{missing} of 9 runs are not there yet" in last
        assert len(find_runs([tmp_path / "runs"])) == 9 - missing
    assert not Path("compare-synthetic.png").exists()
    assert main([*COMPARE, "--shard", "3/4"]) == 0
    assert capfd.readouterr().out == alone
    assert Path("compare-synthetic.png").read_bytes() == Path("alone.png").read_bytes()
    assert main([*COMPARE, "--shard", "2/4"]) == 0  # again, with all of them there
    assert capfd.readouterr().out == alone


def test_two_jobs_with_the_same_share_do_not_clash(tmp_path: Path) -> None:
    """As when an array's job is started again while the first one still runs."""
    command = [*FEDEXP, *COMPARE, "--rounds", "300", "--seeds", "2", "--shard", "1/1"]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], printed
    stored = [load_run(folder) for folder in find_runs([tmp_path / "runs"])]
    assert len(stored) == 6
    assert all(run.result for run in stored)
    for run in stored:  # every round once, whoever made it
        assert "resumed" not in run.environment
        assert [row["round"] for row in run.rows] == list(range(1, len(run.rows) + 1))
    assert any("scaffold" in out for out, _ in printed)
    assert not any("error" in err for _, err in printed)


def test_a_study_of_the_paper_in_shares(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "synthetic", "--rounds", "3", "--jobs", "1"]
    assert main([*command, "--shard", "1/2"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "2 of 4 runs are not there yet" in err
    assert main([*command, "--shard", "2/2"]) == 0
    shown = capfd.readouterr().out
    assert main(command) == 0
    assert capfd.readouterr().out == shown
    assert Path("reproduce-synthetic/table.md").exists()


def test_shares_for_programs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--shard", "1/9", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == {"shard": "1/9", "runs": 9, "missing": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "0/2"], "i from 1 to n"),
        (["--shard", "1/2", "--no-save"], "leave --no-save out"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_mistakes(
    command: str, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "synthetic", *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_runs_that_are_there_are_not_shared_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "synthetic", "--from", "runs", "--shard", "1/2"]) == 2
    assert "leave --shard out" in capfd.readouterr().err
