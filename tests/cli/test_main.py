"""The command line as a user meets it: output, exit status, and one line for each mistake."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedexp.cli.main import main
from fedexp.runs import load_run

SMALL = ["--set", "task.clients=4", "--set", "task.rows=3", "--set", "task.dim=20"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are stored in the current folder by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)


def test_json_is_alone_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "synthetic", "--algorithm", "fedexp", "--rounds", "3", "--json", *SMALL]) == 0
    )
    out, _ = capfd.readouterr()
    result = json.loads(out)
    keys = ["task", "algorithm", "seed", "rounds", "seconds", "status", "folder", "final"]
    assert list(result) == keys
    assert (result["task"], result["algorithm"], result["rounds"]) == ("synthetic", "fedexp", 3)
    assert result["final"]["round"] == 3
    assert result["final"]["server_lr"] >= 1


def test_run_writes_spec_records_and_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "run"
    command = ["run", "synthetic", "--rounds", "3", "--cohort", "2", "--seed", "5", *SMALL]
    assert main([*command, "--out", str(out)]) == 0
    stored = load_run(out)
    assert [row["round"] for row in stored.rows] == [1, 2, 3]
    spec = stored.spec
    assert (spec["seed"], spec["cohort"], spec["options"]["server.eps"]) == (5, 2, 0.0)
    assert load_file(out / "model.safetensors")["params"].shape == (20,)
    assert stored.environment["threads"] == 1  # a small model is not split over threads
    assert capfd.readouterr().err == f"fedexp: wrote {out}\n"
    assert main([*command, "--out", str(out), "--rounds", "4"]) == 2
    assert "holds another run: there rounds is 3" in capfd.readouterr().err


def test_compare_gives_options_to_those_that_have_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        "compare",
        "synthetic",
        "--algorithms",
        "fedavg,fedexp",
        "--jobs",
        "1",
        "--rounds",
        "3",
    ]
    options = ["--set", "eps=1e9", "--set", "fedavg:lr=1", "--set", "fedexp:average_last=1"]
    assert main([*command, *options, *SMALL, "--json", "--out", str(tmp_path / "c.png")]) == 0
    fedavg, fedexp = json.loads(capfd.readouterr().out)["algorithms"]
    assert fedavg["finals"] == fedexp["finals"]  # FedExP with a huge eps is FedAvg


def test_compare_reports_divergence_and_dropped_clients(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "synthetic", "--algorithms", "fedexp", "--rounds", "5", "--jobs", "1"]
    out = ["--json", "--out", str(tmp_path / "c.png")]
    assert main([*command, "--set", "local.lr=5", *SMALL, *out]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["algorithms"][0]["finals"] == [None]
    assert "diverged at round" in captured.err
    assert main([*command, "--set", "local.lr=1e30", *SMALL, *out]) == 0
    assert "left out 20 client updates" in capfd.readouterr().err


def test_toy_draws_figure_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "toy.png"
    assert main(["toy", "--rounds", "6", "--start=1,0", "--out", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    assert "FedAvg" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["algorithms", "tasks"])
def test_lists(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    out = capfd.readouterr().out
    assert ("scaffold-exp" if command == "algorithms" else "digits-mlp") in out
    assert "Return " not in out  # descriptions, not the first lines of docstrings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "synthetc"], "did you mean synthetic"),
        (["run", "synthetic", "--algorithm", "fedxp"], "did you mean fedexp"),
        (["compare", "synthetic", "--algorithms", "fedavg,fedxp"], "did you mean fedexp"),
        (["run", "synthetic", "--set", "esp=1"], "did you mean eps"),
        (["run", "synthetic", "--set", "eps=-1"], "eps must not be negative"),
        (["run", "synthetic", "--set", "eps=x"], "must be a number"),
        (["run", "synthetic", "--set", "eps"], "key=value"),
        (["run", "synthetic", "--set", "local.lr=0"], "local.lr must be"),
        (["run", "synthetic", "--set", "task.clients=0"], "at least 1"),
        (["run", "synthetic", "--cohort", "21"], "20 clients; take 20 at most"),
        (["run", "synthetic", "--cohort", "none"], "--cohort"),
        (["run", "synthetic", "--rounds", "0"], "--rounds: must be a whole number from 1"),
        (["run", "synthetic", "--seed", "-1"], "--seed"),
        (["run", "synthetic", "--mode", "papers"], "unknown mode"),
        (["run", "synthetic", "--frobnicate"], "unrecognized arguments"),
        (["run", "digits", "--set", "task.clients=5000"], "use fewer clients"),
        (["compare", "synthetic", "--seeds", "0"], "--seeds"),
        (["compare", "synthetic", "--set", "esp=1"], "did you mean eps"),
        (
            ["compare", "synthetic", "--set", "fedyogi:lr=1"],
            "unknown algorithm in option fedyogi:lr",
        ),
        (["compare", "synthetic", "--set", "fedexp:mu=1"], "unknown option of fedexp"),
        (["compare", "synthetic", "--out", "x.foo"], "end its name in one of"),
        (["run", "synthetic", "--set", "lr=10"], "fedexp has no server lr"),
        (["run", "synthetic", "--set", "task.seed=-1"], "must not be negative"),
        (["run", "synthetic", "--set", "task.dim=1e15"], "out of memory"),
        (["compare", "digits", "--target", "1000"], "--target"),
        (["compare", "synthetic", "--target", "inf"], "--target"),
        (["compare", "digits", "--target", "0.3,high"], "write numbers, e.g. 0.92,0.94"),
        (["run", "synthetic", "--device", "xla"], "cannot train on xla"),
        (["run", "synthetic", "--device", "warp"], "unknown device"),
        (["run", "synthetic", "--precision", "bf16"], "solved in float64"),
        (["toy", "--start", "1"], "--start takes 2 numbers"),
        (["toy", "--out", "/proc/nothing/toy.png"], "cannot write"),
        (["toy", "--out", "toy.xyz"], "cannot write"),
        (["run", "toy", "--out", "/proc/nothing"], "cannot write"),
        (["run", "toy", "--runs", "x", "--no-save"], "exclude each other"),
        (["run", "toy", "--restart"], "holds no run; leave --restart out"),
        (["run", "toy", "--no-save", "--log", "tensorboard"], "leave --no-save out"),
        (["run", "toy", "--log", "paper"], "unknown logger"),
        (["run", "toy", "--checkpoint-every", "-1"], "number of seconds from 0"),
        (["run", "toy", "--stop-at", "-1"], "stop_at must be a positive loss"),
        (["run", "digits", "--stop-at", "101"], "stop_at must be"),
        (["compare", "toy", "--smooth", "0"], "--smooth"),
        (["compare", "toy", "--format", "word"], "invalid choice: 'word'"),
        (["resume", "nothing"], "No such file or directory; name a run folder"),
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
    ],
    ids=str,
)
def test_a_mistake_gets_one_line_and_status_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("fedexp: error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # a mistake leaves nothing behind


def test_warnings_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Steps so large that updates overflow before the server can move."""
    assert main(["run", "synthetic", "--set", "local.lr=1e30", "--rounds", "2", *SMALL]) == 1
    warning, error = capfd.readouterr().err.splitlines()
    assert warning.startswith("fedexp: warning: round 1: 4 client update(s) were not finite")
    assert error.startswith("fedexp: error: no client update was finite in any round")


def test_a_full_disk_and_a_closed_pipe_get_no_traceback() -> None:
    run = [sys.executable, "-m", "fedexp", "run", "toy", "--rounds", "1", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fedexp: error: No space left on device")
    assert done.stderr.count("\n") == 1
    command = Path(sys.executable).parent / "fedexp"  # as it is installed
    piped = f"{shlex.quote(str(command))} tasks | true"
    done = subprocess.run(piped, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
