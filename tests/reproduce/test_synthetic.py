"""Figures 3 and 7: the synthetic study for real, as the command makes it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedexp.cli.main import main
from fedexp.reproduce import STUDIES
from fedexp.reproduce.from_runs import plan_from
from fedexp.reproduce.study import Request
from fedexp.runs import StoredRun, find_runs, load_run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic study in full, as the command leaves it."""
    root = tmp_path_factory.mktemp("synthetic")
    command = ["reproduce", "synthetic", "--jobs", "1", "--runs", str(root / "runs")]
    assert main([*command, "--out", str(root / "out")]) == 0
    return root


def test_synthetic_shows_what_figures_3_and_7_show(done: Path) -> None:
    summary = json.loads((done / "out" / "summary.json").read_text())
    assert [check["holds"] for check in summary["checks"]] == [True] * 4
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


def verdicts(runs: dict[str, StoredRun]) -> list[bool | None]:
    """The verdicts on stored runs, by the algorithm each is counted as."""
    counted = [replace(run, spec={**run.spec, "algorithm": name}) for name, run in runs.items()]
    plan, results = plan_from(STUDIES["synthetic"], Request(), counted)
    return [check.holds for check in plan.study.measure(plan, results).checks]


def test_the_checks_can_fail(done: Path) -> None:
    runs = {run.spec["algorithm"]: run for run in map(load_run, find_runs([done / "runs"]))}
    assert verdicts(runs) == [True] * 4
    assert verdicts({**runs, "fedexp": runs["fedavg"]}) == [False, False, False, True]
    above = replace(runs["fedexp"], rows=[{"server_lr": 11.0, "train_loss": 1.0}])
    assert not verdicts({**runs, "fedexp": above})[3]
