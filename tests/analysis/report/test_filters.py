"""Filters of a report: what each accepts, and what is said of runs that it removes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

import fedexp as fx
from fedexp.analysis.report import Filters, write_report
from fedexp.analysis.report.filters import parse_since
from fedexp.cli.main import main
from fedexp.runs import StoredRun
from tests.helpers.stored_runs import stored, write

NOW = datetime.fromisoformat("2026-11-16T10:00:00+00:00")


def started(when: str | None) -> StoredRun:
    run = stored()
    run.environment.pop("started")
    run.environment.update({} if when is None else {"started": when})
    return run


def test_by_algorithm_and_task() -> None:
    source = "/home/me/study.py:mine"
    runs = [stored("fedavg"), stored("fedexp"), stored("mine", algorithm_source=source)]
    for name in ("mine", "study.py:mine", source):
        assert Filters(algorithms=(name,)).select(runs).runs == runs[2:]
    both = Filters(algorithms=("fedavg", "fedexp"), tasks=("toy",)).select(runs)
    assert both.runs == runs[:2]
    assert both.left_out == "left out 1 by --algorithm fedavg,fedexp"
    assert Filters().select(runs).runs == runs


@pytest.mark.parametrize("filters", [Filters(algorithms=("fedexq",)), Filters(tasks=("tou",))])
def test_a_name_that_no_run_has_is_a_mistake(filters: Filters) -> None:
    with pytest.raises(fx.UsageError, match=r"did you mean (fedexp|toy)"):
        filters.select([stored()])


def test_by_the_number_of_rounds() -> None:
    runs = [stored(rounds=n) for n in (5, 60, 500)]

    def left(*texts: str) -> list[int]:
        return [run.spec["rounds"] for run in Filters(rounds=texts).select(runs).runs]

    assert left("500") == [500]
    assert left("50-500") == [60, 500]
    assert left("5", "100-1000") == [5, 500]
    for text in ("many", "-5", "5-", "9-3"):
        with pytest.raises(fx.UsageError, match=f"--rounds {text}"):
            left(text)


def test_by_the_time_of_their_start() -> None:
    times = ["2026-11-15T08:00:00+0000", "2026-11-16T09:00:00+0000", None, "yesterday"]
    runs = [started(when) for when in times]
    for text in ("2026-11-16", "2026-11-16T08:30:00+00:00"):
        assert Filters(since=text).select(runs).runs == runs[1:2]
    assert Filters(since="2026-11-01").select(runs).runs == runs[:2]
    assert parse_since("90m", NOW).isoformat() == "2026-11-16T08:30:00+00:00"
    assert parse_since("3d", NOW).isoformat() == "2026-11-13T10:00:00+00:00"
    assert parse_since("999999w", NOW).year < 2000
    for text in ("", "soon", "2 fortnights", "2026-13-01"):
        with pytest.raises(fx.UsageError, match="write 2h, 3d, 2026-11-01"):
            parse_since(text)


def test_without_those_that_match_a_pattern() -> None:
    runs = [replace(stored(seed=n), folder=Path(f"runs/trial-{n}")) for n in range(3)]
    for at, run in enumerate(runs):
        run.spec["id"] = f"toy-fedexp-s{at}-abc"
    assert Filters(exclude=("*-s1-*", "trial-2")).select(runs).runs == runs[:1]
    mistyped = Filters(exclude=("*-s7-*", "trial-2")).select(runs)
    assert mistyped.idle == ["--exclude *-s7-*"]


def test_an_empty_selection_names_what_each_filter_removed() -> None:
    runs = [stored("fedavg"), stored("fedexp"), stored("fedexp", rounds=5)]
    with pytest.raises(
        fx.UsageError, match="no run is left of 3: --algorithm fedavg removed 2, --rounds 5 "
    ) as caught:
        Filters(algorithms=("fedavg",), rounds=("5",)).select(runs)
    assert "removed 1" in str(caught.value)


def test_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "report.html"
    for seed in range(2):
        write(runs, "fedavg", seed)
        write(runs, "fedexp", seed)
    command = ["report", str(runs), "-o", str(out), "--since", "1h", "--rounds", "30"]
    assert main([*command, "--algorithm", "fedexp", "--exclude", "*-1", "--exclude", "x"]) == 0
    said = capfd.readouterr().err
    assert "(1 run, 1 task; left out 2 by --algorithm fedexp, 1 by --exclude *-1)" in said
    assert "warning: --exclude x matches no run" in said
    text = out.read_text()
    assert "left out 2 by --algorithm fedexp" in text
    assert "--algorithm fedavg --seed" not in text
    assert main([*command, "--exclude", "*"]) == 2
    assert "no run is left of 4: --exclude * removed 4" in capfd.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    study = fx.compare("toy", ["fedavg", "fedexp"], rounds=2, seeds=2, runs=tmp_path / "runs")
    page = study.report(tmp_path / "a.html", filters=Filters(algorithms=("fedexp",)))
    assert "--algorithm fedavg --seed" not in page.read_text()
    report = write_report([tmp_path / "runs"], tmp_path / "b.html", metrics=["train_loss"])
    assert (report.runs, report.tasks, report.left_out) == (4, 1, "")
