"""Plans: which runs a request leads to, and in which ways they are fewer than the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import main
from fedexp.reproduce import STUDIES, study
from fedexp.reproduce.output import FEWER_SEEDS, head_lines
from fedexp.reproduce.study import SMALL, Request, choose_tasks, make_plan


def test_more_seeds_are_no_deviation_and_more_rounds_are() -> None:
    plan = make_plan(STUDIES["synthetic"], Request(seeds=2))
    assert (plan.comparable, plan.shrunk) == (True, ())
    assert [job.experiment.seed for job in plan.jobs[:2]] == [0, 1]
    longer = make_plan(STUDIES["synthetic"], Request(rounds=300))
    assert (longer.comparable, longer.deviation) == (False, "changed")


def test_tasks_without_data_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cifar10.npz").touch()
    tasks, left_out = choose_tasks(STUDIES["table1"], ())
    assert tasks == ("cifar10",)
    assert [text.split()[0] for text in left_out] == ["emnist", "cifar100", "cinic10"]
    assert all("fedexp data fetch" in text for text in left_out)


def test_emnist_with_few_writers_is_reported(generated_images: Path) -> None:
    plan = make_plan(STUDIES["figure1"], Request())
    assert plan.shrunk == ("EMNIST has 4 writers here instead of 3,400",)
    assert plan.partial == ("emnist",)


def test_fewer_seeds_leave_the_numbers_comparable(
    generated_images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "ALL_WRITERS", 4)
    plan = make_plan(STUDIES["table1"], Request(seeds=2, tasks=("emnist",)))
    assert plan.shrunk == ("emnist: 2 seeds instead of 20",)
    assert plan.comparable
    assert head_lines(plan)[0] == f"SHRUNK, so {FEWER_SEEDS}:"


@pytest.mark.parametrize("task", SMALL)
def test_small_tasks_match_their_description(task: str, generated_images: Path) -> None:
    own = next(each for each in STUDIES.values() if task in each.tasks)
    plan = make_plan(own, Request(small=True, tasks=(task,)))
    (line,) = (line for line in plan.shrunk if line.startswith(f"{task}: ") and "local" in line)
    experiment = plan.jobs[0].experiment
    made, local = experiment.problem, experiment.setup.local
    assert f"{local.steps} local steps of batches of {local.batch_size}" in line
    assert made.test is not None
    if task != "emnist":
        assert f"{len(made.train.fields['y']):,} training" in line
        assert experiment.resolved.cohort == ("all" if task == "cifar10-cnn" else 5)
        assert len(made.train.fields["y"].unique()) > (90 if task == "cifar100" else 9)
    assert not plan.comparable


def test_a_small_study_end_to_end(
    generated_images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "iterate-averaging", "--scale", "small", "--rounds", "2"]
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*command, *where, "--jobs", "1", "--mode", "authors-code"]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("SHRUNK")
    settings = (
        "mode authors-code, 2 rounds, evaluated every 1, arithmetic in the type of the weights"
    )
    assert settings in out
    found: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_text())
    ends = {
        x["algorithm and iterate"]: x["training accuracy (last 10 rounds)"]["ours"]["mean"]
        for x in found["lines"]
    }
    assert len(ends) == 4
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert ends["fedexp, last iterate"] != ends["fedexp, mean of the last two"]
