"""`fedexp run` and `fedexp resume`: runs are stored, resumed, stopped and logged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import main
from fedexp.runs import find_runs, load_run, loggers
from tests.cli.helpers import RUN, SMALL, begin, checkpointed
from tests.runs.helpers import essence

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
    """A logger that records its calls, and kills this process on request."""

    seen: list[Any]
    kills_at: int | None = None
    signal = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, spec: Any, resumed_from: int) -> None:
        self.seen.append((spec["task"], resumed_from))

    def on_round(self, row: Any) -> None:
        stored = load_run(self.folder).rows[-1]["round"]
        assert stored == row["round"], "it should be stored before anyone is notified of it"
        if row["round"] == self.kills_at:
            os.kill(os.getpid(), self.signal)
        self.seen.append(row["round"])

    def end(self, result: Any) -> None:
        self.seen.append(result and result["status"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    monkeypatch.setitem(loggers.LOGGERS, "notebook", Notebook)
    Notebook.seen, Notebook.kills_at = [], None
    return Notebook


def test_consumers_hear_of_everything_once(notebook: type[Notebook]) -> None:
    assert main([*RUN, "--log", "notebook"]) == 0
    assert notebook.seen == [("synthetic", 0), 1, 2, 3, 4, 5, "finished"]
    assert main([*RUN, "--log", "notebook"]) == 0  # nothing happens, nothing is logged
    assert len(notebook.seen) == 7


def test_diagnostics_are_notes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--rounds", "25", "--set", "eps=1e6", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["rounds"] == 25
    assert [line for line in err.splitlines() if line.startswith("fedexp: note: eps prevents")]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_stops_a_run_after_its_round(
    number: int,
    status: int,
    tmp_path: Path,
    notebook: type[Notebook],
    capfd: pytest.CaptureFixture[str],
) -> None:
    notebook.kills_at, notebook.signal = 3, number
    assert main([*RUN, "--rounds", "100000", "--log", "notebook"]) == status
    (folder,) = find_runs([tmp_path / "runs"])
    rows = load_run(folder).rows
    stopping, stopped = capfd.readouterr().err.splitlines()
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
