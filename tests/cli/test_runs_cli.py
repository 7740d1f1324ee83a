"""Kept runs on the command line: stored, resumed, stopped, watched and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import build_parser, main
from fedexp.cli.options import spec_of
from fedexp.runs import Stopped, consumers, execute, find_runs, load_run
from tests.runs.helpers import essence, stop_after

SMALL = ["--set", "task.clients=4", "--set", "task.rows=3", "--set", "task.dim=20"]
RUN = ["run", "synthetic", "--rounds", "5", *SMALL]
FEDEXP = [sys.executable, "-m", "fedexp"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)


def test_runs_are_kept_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    (mine,) = find_runs([tmp_path / "runs"])
    assert mine.name.startswith("synthetic-fedexp-s0-")
    monkeypatch.setenv("FEDEXP_RUNS", "by-variable")
    assert main(RUN) == 0
    assert main([*RUN, "--runs", "by-option"]) == 0
    assert main([*RUN, "--runs", "by-option", "--seed", "1", "--json"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert Path(told["folder"]).parent.name == "by-option"
    names = {folder.parent.name for folder in find_runs([tmp_path])}
    assert names == {"runs", "by-variable", "by-option"}
    before = set(tmp_path.rglob("*"))
    assert main([*RUN, "--no-save", "--seed", "7"]) == 0
    assert set(tmp_path.rglob("*")) == before


def test_a_finished_run_is_told_and_can_be_restarted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--out", "a"]) == 0
    first = capfd.readouterr()
    kept = (tmp_path / "a" / "records.jsonl").read_bytes()
    for again in ([*RUN, "--out", "a"], ["resume", "a"]):
        assert main(again) == 0
        second = capfd.readouterr()
        assert second.out == first.out
        assert second.err.startswith("fedexp: nothing to do: a was finished before (--restart")
        assert (tmp_path / "a" / "records.jsonl").read_bytes() == kept
    state = essence(tmp_path / "a")
    assert main(["resume", "a", "--restart", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "finished"
    assert essence(tmp_path / "a") == state
    assert (tmp_path / "a" / "records.jsonl").read_bytes() != kept  # its times are new


def test_quiet_prints_lines_for_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--rounds", "60", "--quiet", "--no-save", "--evaluate-every", "20"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("round 3/60  step ")
    assert lines[-1].startswith("round 60/60  loss ")


def test_stop_at_ends_a_run_early(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "synthetic", "--rounds", "50", "--stop-at", "0.05", "--json", *SMALL]
    assert main(command) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["status"] == "target"
    assert result["rounds"] < 50
    rows = load_run(Path(result["folder"])).rows
    assert rows[-1]["train_loss"] <= 0.05 < rows[-2]["train_loss"]


def test_a_diverged_run_fails_each_time_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main([*RUN, "--rounds", "30", "--set", "local.lr=5"]) == 1
        assert "fedexp: error: diverged at round" in capfd.readouterr().err


class Notebook:
    """A consumer that writes down what it hears, and fails where it is told to."""

    heard: list[Any]
    fails_at: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, spec: Any, resumed_from: int) -> None:
        self.heard.append((spec["task"], resumed_from))

    def on_round(self, row: Any) -> None:
        stored = load_run(self.folder).rows[-1]["round"]
        assert stored == row["round"], "it should be stored before anybody hears of it"
        if row["round"] == self.fails_at:
            raise RuntimeError("no route to host")
        self.heard.append(row["round"])

    def end(self, result: Any) -> None:
        self.heard.append(result["status"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    monkeypatch.setitem(consumers.CONSUMERS, "notebook", Notebook)
    Notebook.heard, Notebook.fails_at = [], None
    return Notebook


def test_consumers_hear_of_everything_once(notebook: type[Notebook]) -> None:
    assert main([*RUN, "--log", "notebook"]) == 0
    assert notebook.heard == [("synthetic", 0), 1, 2, 3, 4, 5, "finished"]
    assert main([*RUN, "--log", "notebook"]) == 0  # nothing happens, nobody hears
    assert len(notebook.heard) == 7


def test_a_consumer_that_fails_does_not_cost_the_run(
    notebook: type[Notebook], capfd: pytest.CaptureFixture[str]
) -> None:
    notebook.fails_at = 3
    assert main([*RUN, "--log", "notebook", "--out", "a"]) == 0
    assert notebook.heard == [("synthetic", 0), 1, 2]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "no route to host" in warnings[0]
    assert len(load_run(Path("a")).rows) == 5


def test_advice_is_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--rounds", "25", "--set", "eps=1e6", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["rounds"] == 25
    assert [line for line in err.splitlines() if line.startswith("fedexp: note: eps is")]


def wait_for_rows(folder: Path, process: subprocess.Popen[str]) -> Path:
    """The run that the process has begun, once it has some rows."""
    while process.poll() is None:
        found = list(folder.glob("*/records.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 3:
            return found[0].parent
        time.sleep(0.02)
    raise AssertionError("the run ended by itself")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_stops_a_run_after_its_round(number: int, status: int, tmp_path: Path) -> None:
    command = ["run", "synthetic", "--rounds", "100000", *SMALL]
    process = subprocess.Popen([*FEDEXP, *command], stderr=subprocess.PIPE, text=True)
    folder = wait_for_rows(tmp_path / "runs", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    rows = load_run(folder).rows
    stopping, stopped = err.splitlines()
    assert stopping.startswith("fedexp: stopping after this round")
    assert stopped == (
        f"fedexp: stopped after round {len(rows)}; "
        f"continue with: fedexp resume {folder.relative_to(tmp_path)}"
    )
    assert checkpointed(folder) == len(rows)


def checkpointed(folder: Path) -> int:
    return int(json.loads((folder / "checkpoint.json").read_text())["round"])


def begin(command: list[str], folder: Path, round: int) -> None:
    """What `fedexp run` leaves when it is stopped after a round."""
    parser = build_parser()
    args = parser.parse_args(command)
    listen, wish = stop_after(round)
    with pytest.raises(Stopped):
        execute(spec_of(args, args.algorithm, args.seed), folder, listen, stop=wish)


def test_resume_needs_the_folder_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [*RUN, "--algorithm", "scaffold-exp", "--cohort", "3", "--set", "eps=0.1"]
    assert main([*command, "--out", "whole"]) == 0
    begin(command, tmp_path / "runs", 2)
    (folder,) = find_runs([tmp_path / "runs"])
    folder = folder.rename(tmp_path / "moved")
    capfd.readouterr()
    assert main(["resume", "moved"]) == 0
    assert capfd.readouterr().err.startswith("fedexp: moved goes on after round 2\n")
    assert essence(folder) == essence(tmp_path / "whole")


def test_run_goes_on_with_what_it_finds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin(RUN, tmp_path / "runs", 3)
    assert main([*RUN, "--quiet"]) == 0
    told, *lines, _ = capfd.readouterr().err.splitlines()
    assert told.endswith("goes on after round 3")
    assert [line.split()[1] for line in lines] == ["4/5", "5/5"]  # not those of before


COMPARE = ["compare", "synthetic", "--algorithms", "fedavg,fedexp", *SMALL]


def test_a_comparison_keeps_its_runs_and_returns_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*COMPARE, "--seeds", "2", "--rounds", "4"]
    assert main([*command, "--jobs", "2"]) == 0
    first = capfd.readouterr().out
    assert len(find_runs([tmp_path / "runs"])) == 4
    assert main([*RUN, "--rounds", "4", "--seed", "1"]) == 0
    assert "nothing to do" in capfd.readouterr().err  # `run` and `compare` share their runs

    def no_workers(*arguments: Any, **more: Any) -> None:
        raise AssertionError("nothing should run")

    monkeypatch.setattr("fedexp.runs.pool.ProcessPoolExecutor", no_workers)
    monkeypatch.setattr("fedexp.runs.session.remaining", no_workers)
    assert main([*command, "--jobs", "2"]) == 0
    assert capfd.readouterr().out == first
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(AssertionError, match="nothing should run"):
        main([*command, "--jobs", "2"])


@pytest.mark.parametrize("early", [True, False], ids=["workers import", "workers run"])
def test_ctrl_c_ends_a_comparison_in_order(early: bool, tmp_path: Path) -> None:
    command = [*COMPARE, "--rounds", "100000", "--seeds", "2", "--jobs", "2"]
    process = subprocess.Popen(
        [*FEDEXP, *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 3:  # two workers, and Python's own helper
        time.sleep(0.05)
    if not early:
        wait_for_rows(tmp_path / "runs", process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == [
        "fedexp: stopping after this round (Ctrl-C again: at once)",
        "fedexp: stopped; the same command continues",
    ]
    for folder in find_runs([tmp_path / "runs"]) if not early else []:
        assert checkpointed(folder) == len(load_run(folder).rows)


def test_the_same_command_continues_a_comparison(tmp_path: Path) -> None:
    for name, rounds in {"fedavg": 2, "fedexp": 3}.items():
        begin([*RUN, "--algorithm", name], tmp_path / "runs", rounds)
    assert main([*COMPARE, "--rounds", "5", "--jobs", "2"]) == 0
    stored = [load_run(folder) for folder in find_runs([tmp_path / "runs"])]
    assert [run.environment["resumed"][0]["round"] for run in stored] == [2, 3]
    assert [run.result and run.result["status"] for run in stored] == ["finished", "finished"]


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    command = [*COMPARE, "--rounds", "100000", "--jobs", "2"]
    process = subprocess.Popen([*FEDEXP, *command], stderr=subprocess.PIPE, text=True)
    wait_for_rows(tmp_path / "runs", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker goes on without its parent"
        time.sleep(0.1)


def test_tables_in_every_format(capfd: pytest.CaptureFixture[str]) -> None:
    found = {}
    command = [*COMPARE, "--rounds", "4", "--seeds", "2", "--jobs", "1", "--smooth", "2"]
    for form in ("text", "markdown", "csv", "latex"):
        assert main([*command, "--format", form]) == 0
        found[form] = capfd.readouterr().out.splitlines()
    assert found["text"][0].startswith("synthetic: 4 rounds")
    assert found["markdown"][1] == "| --- | ---: | ---: | ---: |"
    assert found["csv"][0].split(",")[:3] == ["algorithm", "seeds", "reached"]
    assert found["latex"][0] == r"\begin{tabular}{lrrr}"
    values = dict(zip(found["csv"][0].split(","), found["csv"][1].split(","), strict=True))
    rows = [
        load_run(folder).rows for folder in find_runs([Path("runs")]) if "fedavg" in folder.name
    ]
    last_two = [row["train_loss"] for run in rows for row in run[-2:]]
    assert float(values["final_mean"]) == pytest.approx(sum(last_two) / 4, rel=1e-12)
