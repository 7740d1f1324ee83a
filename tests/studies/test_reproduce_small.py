"""Studies shrunk to a CPU, on generated images: what is run is what the output says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import main
from fedexp.reproduce import study as plans
from fedexp.reproduce.catalog import STUDIES
from fedexp.reproduce.output import FEWER_SEEDS, head_lines
from fedexp.reproduce.study import SMALL, Request
from fedexp.tasks import images
from tests.tasks.test_images import splits


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated images in the place of the data sets."""
    monkeypatch.setattr(images, "load_splits", lambda name, folder: splits(name, count=1200))
    monkeypatch.setattr(plans, "_missing", lambda task: None)


def test_emnist_with_few_writers_is_told(generated: None) -> None:
    plan = plans.make_plan(STUDIES["figure1"], Request())
    assert plan.shrunk == ("EMNIST has 4 writers here instead of 3,400",)
    assert plan.partial == ("emnist",)


def test_fewer_seeds_leave_the_figures_comparable(
    generated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "WRITERS", 4)
    plan = plans.make_plan(STUDIES["table1"], Request(seeds=2, tasks=("emnist",)))
    assert plan.shrunk == ("emnist: 2 seeds instead of 20",)
    assert plan.comparable
    assert head_lines(plan)[0] == f"SHRUNK, so {FEWER_SEEDS}:"


@pytest.mark.parametrize("task", SMALL)
def test_small_tasks_are_what_the_output_says(task: str, generated: None) -> None:
    study = next(s for s in STUDIES.values() if task in s.tasks)
    plan = plans.make_plan(study, Request(small=True, tasks=(task,)))
    (meaning,) = (line for line in plan.shrunk if line.startswith(f"{task}: ") and "local" in line)
    made = plan.jobs[0].spec.prepare()
    local = made.setup.local
    assert f"{local.steps} local steps of batches of {local.batch_size}" in meaning
    assert made.task.test is not None
    if task != "emnist":
        assert f"{len(made.task.train.fields['y']):,} training" in meaning
        assert made.cohort == (None if task == "cifar10-cnn" else 5)
        assert len(made.task.train.fields["y"].unique()) > (90 if task == "cifar100" else 9)
    assert not plan.comparable


def test_a_shrunk_study_from_end_to_end(
    generated: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(images, "load_splits", lambda name, folder: splits(name, count=150))
    command = ["reproduce", "iterate-averaging", "--scale", "small", "--rounds", "2"]
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*command, *where, "--jobs", "1", "--mode", "authors-code"]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("SHRUNK")
    how = "mode authors-code, 2 rounds, evaluated every 1, arithmetic in the type of the weights"
    assert how in out
    found: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_text())
    ends = {
        x["algorithm and iterate"]: x["training accuracy (last 10 rounds)"]["ours"]["mean"]
        for x in found["lines"]
    }
    assert len(ends) == 4
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert ends["fedexp, last iterate"] != ends["fedexp, mean of the last two"]
