"""`fedexp reproduce`: toy and synthetic for real, and what they print about the paper's words."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.cli.main import main
from fedexp.reproduce import synthetic, toy
from fedexp.reproduce.catalog import STUDIES
from fedexp.reproduce.study import Request, make_plan
from fedexp.reproduce.toy import LAST, PLAIN, toy_paths
from fedexp.runs import find_runs, load_run

FILES = {"table.md", "table.csv", "summary.json", "figure.png", "figure.svg", "figure.pdf"}


def held(summary: dict[str, Any]) -> list[bool | None]:
    return [check["holds"] for check in summary["checks"]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic study in full, as the command leaves it."""
    root = tmp_path_factory.mktemp("synthetic")
    command = ["reproduce", "synthetic", "--jobs", "1", "--runs", str(root / "runs")]
    assert main([*command, "--out", str(root / "out")]) == 0
    return root


def test_toy_shows_what_figure_2_shows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "toy", "--out", str(tmp_path / "out")]) == 0
    out, _ = capfd.readouterr()
    assert "distance to the optimum falls every round: yes (30 of 30 rounds)" in out
    assert "SHRUNK" not in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert held(summary) == [True] * 7
    last = next(line for line in summary["lines"] if line["iterate"] == LAST)
    assert last["rounds the distance grows in"]["ours"]["mean"] == 0
    assert last["rounds the loss grows in"]["ours"]["mean"] == 15


def test_the_checks_of_toy_can_fail() -> None:
    """FedAvg in the place of FedExP: its distance falls too, but nothing else holds."""
    paths = dict(toy_paths((0.0, 0.0), 30))
    swapped = toy._checks({**paths, LAST: paths[PLAIN]})
    names = ("start", "distance", "oscillation", "turns", "mean", "faster", "two")
    verdicts = {name: check.holds for name, check in zip(names, swapped, strict=True)}
    assert verdicts["distance"]
    assert not verdicts["turns"]
    assert not verdicts["faster"]
    away = replace(paths[LAST], points=paths[LAST].points.flip(0))
    assert not toy._checks({**paths, LAST: away})[1].holds
    calm = replace(paths[LAST], loss=sorted(paths[LAST].loss, reverse=True))
    assert not toy._checks({**paths, LAST: calm})[2].holds


def test_synthetic_shows_what_figures_3_and_7_show(done: Path) -> None:
    summary = json.loads((done / "out" / "summary.json").read_text())
    assert held(summary) == [True] * 4
    assert (summary["shrunk"], summary["comparable"]) == ([], True)
    losses = {
        line["algorithm"]: line["final training loss"]["ours"]["mean"] for line in summary["lines"]
    }
    assert sorted(losses, key=losses.__getitem__) == ["fedexp", "scaffold", "fedadagrad", "fedavg"]
    runs = [load_run(folder) for folder in find_runs([done / "runs"])]
    steps = {run.spec["algorithm"]: [row["server_lr"] for row in run.rows] for run in runs}
    assert set(steps["fedavg"]) == set(steps["scaffold"]) == {10.0}
    above = np.array(steps["fedexp"]) > 10
    assert 0 < above.sum() < len(above) == 200
    assert max(steps["fedexp"]) > 100


def test_finished_runs_are_not_run_again(done: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = sorted((done / "runs").glob("*/records.jsonl"))
    before = [path.stat().st_mtime_ns for path in records]
    command = ["reproduce", "synthetic", "--jobs", "1", "--runs", str(done / "runs")]
    assert main([*command, "--out", str(done / "again"), "--format", "csv"]) == 0
    assert [path.stat().st_mtime_ns for path in records] == before
    assert len(records) == 4
    out, _ = capfd.readouterr()
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["algorithm"] for row in rows] == ["fedexp", "fedavg", "scaffold", "fedadagrad"]
    assert {row["comparable"] for row in rows} == {"yes"}
    assert (done / "again" / "table.csv").read_text() == (done / "out" / "table.csv").read_text()


def test_a_killed_study_goes_on_where_it_was(done: Path, tmp_path: Path) -> None:
    command = ["reproduce", "synthetic", "--jobs", "1", "--runs", str(tmp_path / "runs")]
    command += ["--out", str(tmp_path / "out"), "--checkpoint-every", "0", "--quiet"]
    words = [sys.executable, "-m", "fedexp", *command]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("fedavg s0 round 50/" in line for line in process.stderr)
        process.kill()
    known = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert [path.parent.name.split("-")[1] for path in known] == ["fedexp"]
    assert main(command) == 0
    assert all(path.stat().st_mtime_ns == before for path, before in known.items())
    assert (tmp_path / "out" / "table.csv").read_text() == (done / "out" / "table.csv").read_text()
    (resumed,) = tmp_path.glob("runs/synthetic-fedavg-*/environment.json")
    assert json.loads(resumed.read_text())["resumed"]


def test_the_checks_of_synthetic_can_fail(done: Path) -> None:
    outcomes = {
        run.spec["algorithm"]: [run.outcome()] for run in map(load_run, find_runs([done / "runs"]))
    }
    swapped = {**outcomes, "fedexp": outcomes["fedavg"]}
    lines = [synthetic._line(name, runs) for name, runs in swapped.items()]
    checks = (*synthetic._order(lines), *synthetic._steps(swapped))
    assert [check.holds for check in checks] == [False, False, False, True]
    always = [replace(outcomes["fedexp"][0], rows=[{"server_lr": 11.0, "train_loss": 1.0}])]
    assert not synthetic._steps({**outcomes, "fedexp": always})[1].holds


def test_shrinking_is_the_first_thing_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "synthetic", "--rounds", "3", "--jobs", "1"]
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*command, *where]) == 0
    out, err = capfd.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith("SHRUNK, so the published figures are not comparable line by line")
    assert second == "  3 rounds instead of 200"
    assert "SHRUNK" in err.splitlines()[0]
    assert (tmp_path / "out" / "table.md").read_text().startswith("> SHRUNK")
    assert (tmp_path / "out" / "table.csv").read_text().splitlines()[1].endswith(",no")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["shrunk"], summary["comparable"]) == (["3 rounds instead of 200"], False)


def test_more_seeds_shrink_nothing_and_more_rounds_are_told() -> None:
    plan = make_plan(STUDIES["synthetic"], Request(seeds=2))
    assert (plan.comparable, plan.shrunk) == (True, ())
    assert [job.spec.seed for job in plan.jobs[:2]] == [0, 1]
    longer = make_plan(STUDIES["synthetic"], Request(rounds=300))
    assert (longer.comparable, longer.word) == (False, "changed")


def test_the_list_names_every_study_with_its_cost(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    out, _ = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:-2:2]] == list(STUDIES)
    assert "140 runs of 500 rounds" in out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "--list names them all"),
        (["tabel1"], "did you mean table1?"),
        (["toy", "--task", "emnist"], "unknown task of toy"),
        (["table1", "--task", "mnist"], "did you mean emnist?"),
        (["table1"], "fedexp data fetch emnist"),
        (["momentum", "--task", "cifar100"], "fedexp data fetch cifar100"),
        (["toy", "--out", "/dev/null/x"], "choose another --out"),
    ],
)
def test_mistakes_get_one_line_with_a_remedy(
    arguments: list[str],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    _, err = capfd.readouterr()
    assert remedy in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
