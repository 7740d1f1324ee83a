"""Runs as sections and series: what is averaged, what is separate, what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedexp.analysis.report.sections import common_and_differing, load_all, sections, status
from fedexp.errors import UsageError
from tests.helpers.stored_runs import stored, write


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
    assert "server.eps_mode" not in names  # only FedExP has it, and it is at its default
    assert not set(names) & set(common)


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


def test_no_runs_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no runs found"):
        sections([])


def test_another_device_is_another_setting() -> None:
    there = stored()
    (section,) = sections([there, replace(there, spec={**there.spec, "device": "cuda"})])
    assert [s.label for s in section.series] == ["fedexp device=cuda", "fedexp device=none"]
