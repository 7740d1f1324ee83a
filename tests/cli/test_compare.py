"""`fedexp compare`: stored runs return at once, others resume; signals, tables, JSON."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from fedexp import __version__
from fedexp.api import workers_for
from fedexp.catalogue import TASKS
from fedexp.cli.main import main
from fedexp.experiment import Experiment
from fedexp.runs import find_runs, load_run
from fedexp.runs.execute import stop_request
from fedexp.runs.workers import interrupts_blocked
from fedexp.tasks import Task, synthetic
from tests.cli.helpers import FEDEXP, RUN, SMALL, begin, checkpointed, wait_for_rows

pytestmark = pytest.mark.usefixtures("elsewhere")
COMPARE = ["compare", "synthetic", "--algorithms", "fedavg,fedexp", *SMALL]


def test_a_comparison_stores_its_runs_and_returns_at_once(
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

    monkeypatch.setattr("fedexp.runs.workers.worker_processes", no_workers)
    monkeypatch.setattr("fedexp.experiment.train", no_workers)
    assert main([*command, "--jobs", "2"]) == 0
    assert capfd.readouterr().out == first
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(AssertionError, match="nothing should run"):
        main([*command, "--jobs", "2"])


def test_runs_of_other_data_are_refused_until_they_are_restarted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*COMPARE, "--rounds", "4", "--jobs", "1"]
    assert main(command) == 0
    first = capfd.readouterr().out

    def doubled(*arguments: Any, **more: Any) -> Task:
        task = synthetic(*arguments, **more)
        task.train.fields["y"].mul_(2)
        return task

    doubled.__signature__ = signature(synthetic)  # type: ignore[attr-defined]
    doubled.__annotations__ = synthetic.__annotations__
    monkeypatch.setitem(TASKS, "synthetic", doubled)
    gc.collect()  # the task of the first command is shared as long as it exists
    assert main(command) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "the training data (y) differs; --restart discards it" in err.splitlines()[-1]
    assert main([*command, "--restart"]) == 0
    assert capfd.readouterr().out != first
    assert main(command) == 0
    assert main([*command, "--restart", "--no-save"]) == 2
    assert "--restart needs stored runs" in capfd.readouterr().err
    assert main(["reproduce", "synthetic", "--from", "runs", "--restart"]) == 2
    assert "leave --restart out" in capfd.readouterr().err
    gc.collect()  # nor does another test share the doubled one


def test_a_gpu_gets_one_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedexp.api.available_cores", lambda: 8)
    devices = (None, "cuda", "cuda:1", "cpu")
    assert [workers_for(Experiment("digits", device=each)) for each in devices] == [8, 1, 1, 8]


@pytest.mark.parametrize("command", [COMPARE, ["tune", "digits", "--algorithm", "fedavg"]])
def test_json_and_another_format_are_refused(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json", "--format", "csv"]) == 2
    assert "--json and --format csv exclude each other" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_further_targets_are_in_every_format(capfd: pytest.CaptureFixture[str]) -> None:
    command = [*COMPARE, "--rounds", "3", "--seeds", "1", "--target", "0.5,0.01"]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["target"], [more["target"] for more in printed["further"]]) == (0.5, [0.01])
    for table in (printed, printed["further"][0]):
        assert [line["algorithm"] for line in table["algorithms"]] == ["fedavg", "fedexp"]
    assert main([*command, "--format", "csv"]) == 0
    assert "rounds_mean_0.01" in capfd.readouterr().out


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


def test_ctrl_c_while_workers_are_started_is_not_lost() -> None:
    with stop_request() as request:
        with interrupts_blocked():
            os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10  # the kernel may choose another thread, which is slower
        while not request():
            assert time.monotonic() < deadline, "the signal is lost"
        assert request.signal == signal.SIGINT


def test_the_same_command_continues_a_comparison(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, rounds in {"fedavg": 2, "fedexp": 3}.items():
        begin([*RUN, "--algorithm", name], tmp_path / "runs", rounds)
    (path,) = tmp_path.glob("runs/*-fedexp-*/environment.json")
    path.write_text(path.read_text().replace(__version__, "0.0.9"))
    assert main([*COMPARE, "--rounds", "5", "--jobs", "2"]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == 1  # though it was a worker's
    assert "was started with fedexp 0.0.9" in warned[0]
    stored = [load_run(folder) for folder in find_runs([tmp_path / "runs"])]
    assert [run.environment["resumed"][0]["round"] for run in stored] == [2, 3]
    assert [run.result and run.result["status"] for run in stored] == ["finished", "finished"]


def test_tables_in_every_format(capfd: pytest.CaptureFixture[str]) -> None:
    found = {}
    command = [*COMPARE, "--rounds", "4", "--seeds", "2", "--jobs", "1", "--smooth", "2"]
    for form in ("text", "markdown", "csv", "latex"):
        assert main([*command, "--format", form]) == 0
        found[form] = capfd.readouterr().out.splitlines()
    assert found["text"][0].startswith("synthetic: 4 rounds")
    assert found["text"][1].endswith("final train loss (last 2 rounds)")
    assert found["markdown"][1] == "| --- | ---: | ---: | ---: |"
    assert found["csv"][0].split(",")[:3] == ["algorithm", "seeds", "reached"]
    assert found["latex"][0] == r"\begin{tabular}{lrrr}"
    values = dict(zip(found["csv"][0].split(","), found["csv"][1].split(","), strict=True))
    rows = [
        load_run(folder).rows for folder in find_runs([Path("runs")]) if "fedavg" in folder.name
    ]
    last_two = [row["train_loss"] for run in rows for row in run[-2:]]
    assert float(values["final_mean"]) == pytest.approx(sum(last_two) / 4, rel=1e-12)


def test_an_option_that_some_algorithms_lack_gets_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    line = "fedexp: warning: option lr is server.lr of fedavg; it has no effect on fedexp\n"
    assert main([*COMPARE, "--rounds", "2", "--set", "lr=0.5"]) == 0
    assert capfd.readouterr().err.count(line) == 1
    assert main([*COMPARE, "--rounds", "2", "--set", "fedavg:lr=0.5"]) == 0
    assert "has no effect" not in capfd.readouterr().err
    assert main([*COMPARE, "--rounds", "2", "--set", "momentun=0.5"]) == 2
    assert "unknown option of fedavg 'momentun'" in capfd.readouterr().err
