"""`fedexp run` and `fedexp resume`: runs are stored, resumed, stopped and logged."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import main
from fedexp.runs import StoredRun, find_runs, load_run, loggers
from tests.cli.helpers import FEDEXP, RUN, SMALL, begin, checkpointed, wait_for_rows
from tests.runs.helpers import essence, untimed

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_runs_are_stored_where_options_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    (folder,) = find_runs([tmp_path / "runs"])
    assert folder.name.startswith("synthetic-fedexp-s0-")
    monkeypatch.setenv("FEDEXP_RUNS", "by-variable")
    assert main(RUN) == 0
    assert main([*RUN, "--runs", "by-option"]) == 0
    assert main([*RUN, "--runs", "by-option", "--seed", "1", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert Path(printed["folder"]).parent.name == "by-option"
    names = {folder.parent.name for folder in find_runs([tmp_path])}
    assert names == {"runs", "by-variable", "by-option"}
    before = set(tmp_path.rglob("*"))
    assert main([*RUN, "--no-save", "--seed", "7"]) == 0
    assert set(tmp_path.rglob("*")) == before


def test_a_spec_is_run_with_the_options_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> StoredRun:
        assert main(["run", *words, "--json"]) == 0
        return load_run(Path(json.loads(capfd.readouterr().out)["folder"]))

    first = run(*RUN[1:], "--algorithm", "scaffold-exp", "--seed", "3", "--set", "eps=0.1")
    copy = (first.folder / "spec.toml").rename(tmp_path / "copy.toml")
    again = run("copy.toml", "--runs", "again")
    assert (again.spec, again.folder.name) == (first.spec, first.folder.name)
    assert untimed(again.rows) == untimed(first.rows)
    changed = run("copy.toml", "--set", "local.lr=0.03", "--rounds", "3", "--seed", "4")
    assert (changed.spec["algorithm"], changed.spec["seed"]) == ("scaffold-exp", 4)
    assert changed.spec["options"] == first.spec["options"] | {"local.lr": 0.03}
    assert len(changed.rows) == 3
    copy.write_text('task = "toy"\nround = 3\n')
    assert main(["run", "copy.toml"]) == 2
    assert "unknown name in copy.toml 'round'; did you mean rounds" in capfd.readouterr().err


def test_a_finished_run_is_reported_and_can_be_restarted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--out", "a"]) == 0
    first = capfd.readouterr()
    before = (tmp_path / "a" / "records.jsonl").read_bytes()
    for again in ([*RUN, "--out", "a"], ["resume", "a"]):
        assert main(again) == 0
        second = capfd.readouterr()
        assert second.out == first.out
        assert second.err.startswith("fedexp: nothing to do: a was finished before (--restart")
        assert (tmp_path / "a" / "records.jsonl").read_bytes() == before
    state = essence(tmp_path / "a")
    assert main(["resume", "a", "--restart", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "finished"
    assert essence(tmp_path / "a") == state
    assert (tmp_path / "a" / "records.jsonl").read_bytes() != before  # its times are new


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
    capfd.readouterr()
    assert main(command) == 0  # it is over, though it has not all its rounds
    assert "resumes" not in capfd.readouterr().err


def test_a_diverged_run_fails_each_time_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main([*RUN, "--rounds", "30", "--set", "local.lr=5"]) == 1
        assert "fedexp: error: diverged at round" in capfd.readouterr().err


class Notebook:
    """A logger that records its calls, and fails on request."""

    seen: list[Any]
    fails_at: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, spec: Any, resumed_from: int) -> None:
        self.seen.append((spec["task"], resumed_from))

    def on_round(self, row: Any) -> None:
        stored = load_run(self.folder).rows[-1]["round"]
        assert stored == row["round"], "it should be stored before anyone is notified of it"
        if row["round"] == self.fails_at:
            raise RuntimeError("no route to host")
        self.seen.append(row["round"])

    def end(self, result: Any) -> None:
        self.seen.append(result["status"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    monkeypatch.setitem(loggers.LOGGERS, "notebook", Notebook)
    Notebook.seen, Notebook.fails_at = [], None
    return Notebook


def test_consumers_hear_of_everything_once(notebook: type[Notebook]) -> None:
    assert main([*RUN, "--log", "notebook"]) == 0
    assert notebook.seen == [("synthetic", 0), 1, 2, 3, 4, 5, "finished"]
    assert main([*RUN, "--log", "notebook"]) == 0  # nothing happens, nothing is logged
    assert len(notebook.seen) == 7


def test_a_logger_that_fails_does_not_cost_the_run(
    notebook: type[Notebook], capfd: pytest.CaptureFixture[str]
) -> None:
    notebook.fails_at = 3
    assert main([*RUN, "--log", "notebook", "--out", "a"]) == 0
    assert notebook.seen == [("synthetic", 0), 1, 2]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "no route to host" in warnings[0]
    assert len(load_run(Path("a")).rows) == 5


def test_diagnostics_are_notes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--rounds", "25", "--set", "eps=1e6", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["rounds"] == 25
    assert [line for line in err.splitlines() if line.startswith("fedexp: note: eps prevents")]


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


def test_resume_needs_the_folder_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [*RUN, "--algorithm", "scaffold-exp", "--cohort", "3", "--set", "eps=0.1"]
    assert main([*command, "--out", "whole"]) == 0
    begin(command, tmp_path / "runs", 2)
    (folder,) = find_runs([tmp_path / "runs"])
    folder = folder.rename(tmp_path / "moved")
    capfd.readouterr()
    assert main(["resume", "moved"]) == 0
    assert capfd.readouterr().err.startswith("fedexp: moved resumes after round 2\n")
    assert essence(folder) == essence(tmp_path / "whole")


def test_run_resumes_what_it_finds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin(RUN, tmp_path / "runs", 3)
    assert main([*RUN, "--quiet"]) == 0
    printed, *lines, _ = capfd.readouterr().err.splitlines()
    assert printed.endswith("resumes after round 3")
    assert [line.split()[1] for line in lines] == ["4/5", "5/5"]  # not those of before
