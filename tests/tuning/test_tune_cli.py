"""`fedexp tune` on the command line: tables, pictures, the next command, one line per mistake."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedexp.cli.main import main
from tests.helpers.tuning import OPTIONS

BRIEF = ["--rounds", "4", "--jobs", "1", *OPTIONS]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_table_picture_and_next_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "synthetic", "--algorithm", "fedavg", *BRIEF]) == 0
    out, err = capfd.readouterr()
    assert "20 trials of 4 rounds" in out
    assert "score: training loss, mean of rounds 1 to 4" in out
    assert err.splitlines()[-1] == "wrote tune-synthetic-fedavg.png"
    assert Path("tune-synthetic-fedavg.png").read_bytes().startswith(b"\x89PNG")
    command = shlex.split(out.splitlines()[-1])
    assert command[:5] == ["fedexp", "run", "synthetic", "--algorithm", "fedavg"]
    assert main([*command[1:], "--rounds", "2", "--no-save"]) == 0


def test_the_best_of_several_algorithms_in_every_format(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "synthetic", "--algorithm", "fedprox,fedexp", *BRIEF]
    assert main([*command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [each["algorithm"] for each in found["algorithms"]] == ["fedprox", "fedexp"]
    for each, option in zip(found["algorithms"], ["client.mu", "local.lr"], strict=True):
        known = [trial for trial in each["trials"] if trial["diverged_at"] is None]
        assert each["best"] == min(known, key=lambda trial: trial["score"])["values"]
        assert list(each["best"]) == [option]
    for name, first in {"csv": "algorithm,", "latex": r"\begin", "markdown": "| algo"}.items():
        assert main([*command, "--format", name]) == 0
        assert capfd.readouterr().out.startswith(first)


def test_nothing_is_stored_if_nothing_is_to_be(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "synthetic", "--algorithm", "fedavg", *BRIEF, "--grid", "local.lr=0.1,0.01"]
    assert main([*command, "--no-save"]) == 0
    assert list(Path().iterdir()) == []
    before = capfd.readouterr().out
    assert main([*command, "--runs", "here"]) == 0
    assert capfd.readouterr().out == before
    assert len(list(Path("here/trials").iterdir())) == 2


def test_the_rule_of_thumb_explains_its_choice(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "synthetic", "--epsilon", *BRIEF]) == 0
    *table, explained, command = capfd.readouterr().out.splitlines()
    assert table[0].split() == ["eps", "train", "loss", "median", "step", "size"]
    assert explained.startswith("eps ")
    assert "(mean of rounds 1 to 4)" in explained
    assert "--set server.eps=" in command


def test_a_grid_of_ones_own_and_options_that_are_set(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "synthetic", "--json", *BRIEF]
    assert main([*command, "--grid", "local.lr=0.1,0.01", "--grid", "steps=3,5"]) == 0
    own = json.loads(capfd.readouterr().out)["algorithms"][0]["trials"]
    assert len(own) == 4
    fixed = ["--algorithm", "fedavg", "--set", "local.lr=0.1"]
    assert main([*command, *fixed]) == 0
    (only,) = json.loads(capfd.readouterr().out)["algorithms"]
    assert [list(trial["values"]) for trial in only["trials"]] == [["server.lr"]] * 4
    assert "--set local.lr=0.1" in only["next"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetc"], "did you mean synthetic"),
        (["synthetic", "--algorithm", "fedxp"], "did you mean fedexp"),
        (["synthetic", "--algorithm", ","], "needs a name"),
        (["synthetic", "--trials", "5"], "--trials is for --protocol free"),
        (["synthetic", "--protocol", "free", "--trials", "0"], "--trials"),
        (["synthetic", "--protocol", "random"], "invalid choice"),
        (["synthetic", "--protocol", "free", "--grid", "lr=1"], "exclude each other"),
        (["synthetic", "--epsilon", "--algorithm", "fedavg"], "fedavg has no eps"),
        (["synthetic", "--epsilon", "--algorithm", "fedexp,fedexp-m"], "one --algorithm"),
        (["synthetic", "--epsilon", "--protocol", "free"], "exclude each other"),
        (["synthetic", "--epsilon", "--set", "eps=1"], "both searched and set"),
        (["synthetic", "--grid", "local.lr=1,2", "--set", "local.lr=1"], "both searched and set"),
        (["synthetic", "--no-save", "--runs", "."], "exclude each other"),
        (["synthetic", "--set", "local.lr=1"], "nothing is left to tune"),
        (["synthetic", "--set", "esp=1"], "did you mean eps"),
        (["synthetic", "--grid", "local.lr=-1"], "local.lr must be"),
        (["synthetic", "--out", "x.png"], "a picture needs a search over two options"),
        (["synthetic", "--algorithm", "fedavg", "--out", "x.foo"], "end its name in one of"),
        (["synthetic", "--evaluate-every", "5"], "leave evaluate_every out"),
        (["synthetic", "--stop-at", "0.1"], "leave stop_at out"),
        (["synthetic", "--runs", "/proc/nothing", *BRIEF], "cannot write"),
        (
            ["synthetic", "--runs", "/proc/nothing", "--protocol", "free", *BRIEF],
            "cannot write",
        ),
        (["synthetic", "--cohort", "21"], "larger than the federation"),
    ],
    ids=str,
)
def test_a_mistake_gets_one_line_and_status_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["tune", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("fedexp: error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # a mistake leaves nothing behind


def test_ctrl_c_stops_after_the_round_and_the_same_command_continues() -> None:
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "400", "--jobs", "1", "--quiet", *OPTIONS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    process.stderr.readline()  # the line of the first round
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "fedexp: stopped; the same command continues"
    assert "Traceback" not in err


def test_a_missing_library_names_its_extra(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a free search needs it."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "synthetic", "--protocol", "free", *BRIEF]) == 2
    assert "pip install 'fedexp[tune]'" in capfd.readouterr().err
    assert list(Path().iterdir()) == []
    assert main(["tune", "synthetic", "--grid", "local.lr=0.1", *BRIEF]) == 0
