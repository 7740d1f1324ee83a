"""Runs as sections and series: what is averaged, what is separate, what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import fedexp as fx
from fedexp.analysis.report.sections import (
    common_and_differing,
    distinct,
    load_runs,
    sections,
    status,
)
from fedexp.errors import UsageError
from fedexp.runs import StoredRun
from tests.helpers.stored_runs import stored, write
from tests.helpers.studies import federation


def load_all(paths: list[Path]) -> tuple[list[StoredRun], list[str]]:
    """Return what a report without filters shows, and its warnings."""
    runs, problems = load_runs(paths)
    chosen, repeated = distinct(runs)
    return chosen, [*problems, *repeated]


def test_seeds_are_one_series_and_settings_are_not() -> None:
    few = [stored(seed=seed, options={"server.eps": "0.1"}) for seed in (1, 0)]
    many = [stored(seed=0, options={"server.eps": "0.2"}), stored("fedavg")]
    (section,) = sections(few + many)
    labels = [series.label for series in section.series]
    assert labels == ["fedexp eps=0.1", "fedexp eps=0.2", "fedavg"]
    assert [run.spec["seed"] for run in section.series[0].runs] == [0, 1]


def test_settings_that_differ_in_a_late_digit_have_different_names() -> None:
    close = [{"server.eps": value} for value in (0.100001, 0.100002)]
    runs = [stored() for _ in close]
    for run, options in zip(runs, close, strict=True):
        run.spec["options"] |= options
    (section,) = sections(runs)
    assert [s.label for s in section.series] == ["fedexp eps=0.100001", "fedexp eps=0.100002"]


def test_a_task_with_other_options_is_another_task() -> None:
    runs = [stored(), stored(options={"task.start": "1,1"})]
    assert [section.title for section in sections(runs)] == ["toy", "toy (start=1,1)"]


def test_how_a_run_ended() -> None:
    diverged = {"status": "diverged", "rounds": 7, "diverged_at": 7, "seconds": 1.0}
    early = {"status": "target", "rounds": 9, "diverged_at": None, "seconds": 1.0}
    assert status(stored(count=12, result=None)) == "unfinished: 12 of 30 rounds"
    assert status(stored(result=diverged)) == "diverged at round 7"
    assert status(stored(result=early)) == "stopped at its target"
    assert status(stored()) == "finished"


def test_common_and_differing_settings() -> None:
    (section,) = sections([stored("fedavg"), stored("fedexp", options={"server.eps": "0.5"})])
    common, names = common_and_differing(section.series)
    assert common["rounds"] == 30
    assert "server.eps" in names
    assert "server.eps_mode" in names  # only FedExP has it, and relative is its default
    assert "server.eps_decay" not in names  # it is at its default
    assert not set(names) & set(common)


def test_steps_are_not_listed_where_epochs_count() -> None:
    options = {"local.epochs": "2", "local.steps": "none"}
    runs = [
        stored("fedavg", seed=seed, options=options, changed=["local.epochs"]) for seed in (0, 1)
    ]
    (section,) = sections(runs)
    (series,) = section.series
    assert "local.steps" not in series.settings
    other = stored("fedavg", options={"local.steps": "5"}, changed=["local.steps"])
    (section,) = sections([*runs, other])
    assert [series.label for series in section.series] == [
        "fedavg local.epochs=2",
        "fedavg local.epochs=none, local.steps=5",
    ]


def test_a_damaged_run_is_named_and_left_out(tmp_path: Path) -> None:
    good, bad = write(tmp_path, "fedavg", 0), write(tmp_path, "fedexp", 0)
    records = bad / "records.jsonl"
    records.write_text("{nonsense\n" + records.read_text())
    runs, problems = load_all([tmp_path])
    assert [run.folder for run in runs] == [good.resolve()]
    (line,) = problems
    assert str(records.resolve()) in line


def test_a_run_counts_once_however_often_it_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "fedavg", 0, count=10)
    runs, problems = load_all([tmp_path, first])
    assert (len(runs), problems) == (1, [])
    longer = write(tmp_path / "b", "fedavg", 0)
    runs, problems = load_all([tmp_path])
    assert [run.folder for run in runs] == [longer.resolve()]
    assert "the same run" in problems[0]


def test_seeds_of_other_content_are_named(tmp_path: Path) -> None:
    def task(factor: float) -> fx.tasks.Task:
        return fx.supervised(
            "own",
            lambda: nn.Linear(3, 2),
            federation(),
            loss=lambda output, y: factor * F.cross_entropy(output, y, reduction="none"),
            rounds=1,
        )

    for seed in (0, 1):
        fx.run(task(1.0), "fedavg", seed=seed, runs=tmp_path)
    assert load_all([tmp_path])[1] == []  # their initial weights may differ
    for seed in (2, 3):
        fx.run(task(100.0), "fedavg", seed=seed, runs=tmp_path)
    runs, (line,) = load_all([tmp_path])
    assert len(runs) == 4
    assert "are seeds of one series, but the loss differs; leave one out with --exclude" in line


def test_no_runs_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no runs found"):
        sections([])


def test_another_device_is_another_setting() -> None:
    there = stored()
    (section,) = sections([there, replace(there, spec={**there.spec, "device": "cuda"})])
    assert [s.label for s in section.series] == ["fedexp device=cuda", "fedexp device=none"]


def test_the_number_of_rounds_does_not_split_a_series(tmp_path: Path) -> None:
    runs = [stored(seed=0), stored(seed=1), stored(seed=2, count=5, rounds=5)]
    (section,) = sections(runs)
    (series,) = section.series
    assert (series.label, len(series.runs), series.seeds) == ("fedexp", 3, 2)
    assert series.settings["rounds"] == "5 to 30"
    short = replace(stored(seed=0, count=5, rounds=5), folder=tmp_path / "trial")
    left, problems = distinct([short, *runs])
    assert left[0] is runs[0]
    assert problems == ["trial is the beginning of a longer run; the longer one counts"]


@pytest.mark.parametrize(
    "settings",
    [
        {"options": {"local.lr_schedule": "cosine"}},
        {"options": {"server_schedule": "linear"}},
        {"options": {"local.step_schedule_over": "run"}},
        {"privacy": {"kind": "central"}},
    ],
)
def test_rounds_split_a_series_where_they_decide_its_first_round(settings: Any) -> None:
    (section,) = sections([stored(**settings), stored(rounds=60, **settings)])
    assert [s.label for s in section.series] == ["fedexp rounds=30", "fedexp rounds=60"]


def test_a_label_has_what_the_user_has_set_and_not_what_follows() -> None:
    modes = [stored(mode=mode) for mode in ("paper", "authors-code")]
    modes[1].spec["options"] |= {"average_last": 1, "local.lr_decay": 0.9, "server.factor": 3}
    assert [s.label for s in sections(modes)[0].series] == [
        "fedexp mode=authors-code",
        "fedexp mode=paper",
    ]
    for run, eps, lr in zip(modes, (0.1, 0.2), (1.0, 2.0), strict=True):
        run.spec.update(mode="paper", changed=["server.eps", "local.lr"])
        run.spec["options"] |= {"server.eps": eps, "local.lr": lr}
    labels = [s.label for s in sections(modes)[0].series]
    assert all("eps=" in label and "local.lr=" in label for label in labels)
    assert all("factor" not in label for label in labels)


def test_where_a_file_is_does_not_matter() -> None:
    here, there = (stored("mine", seed) for seed in (0, 1))
    here.spec["task_source"], there.spec["task_source"] = "a/study.py:task", "b/study.py:task"
    assert [s.label for s in sections([here, there])[0].series] == ["mine"]


def test_speed_ups_are_over_fedavg_with_the_nearest_settings() -> None:
    runs = [stored(name, options={"local.lr": lr}) for name in ("fedavg", "fedexp") for lr in "12"]
    (section,) = sections(runs)
    assert section.references == {
        f"{name} local.lr={lr}": f"fedavg local.lr={lr}"
        for name in ("fedavg", "fedexp")
        for lr in "12"
    }
    assert sections([stored()])[0].references == {}


def test_the_goal_is_recorded_or_follows_from_the_name_of_the_metric() -> None:
    run = stored()
    (old,) = sections([run])
    assert str(old.goal) == "max:test_accuracy"
    assert (old.direction("train_loss"), old.direction("test_f1")) == (False, None)
    run.environment.update(goal="min:test_perplexity", metric="test_perplexity")
    (new,) = sections([run])
    assert new.direction("test_perplexity") is False
    run.environment.pop("goal")
    assert sections([run])[0].goal is None  # neither recorded nor clear from the name
