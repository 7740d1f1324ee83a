"""Archived runs: small, the same to every reader, and not to be changed in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedexp.cli.main import main
from fedexp.errors import UsageError
from fedexp.experiment import Experiment
from fedexp.runs import find_runs, load_run, run_all
from fedexp.runs.read import texts

EXPERIMENTS = [
    Experiment("synthetic", "fedexp", rounds=6, evaluate_every=2, options={"task.dim": 20}),
    Experiment("toy", "fedavg", seed=1, rounds=1),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    run_all(EXPERIMENTS, root=root)
    return root


def archive(runs: Path, to: Path, *more: str) -> int:
    return main(["archive", str(runs), "--to", str(to), *more])


def test_readers_find_the_same_runs_in_the_archive(runs: Path, tmp_path: Path) -> None:
    assert archive(runs, tmp_path) == 0
    pairs = zip(find_runs([runs]), find_runs([tmp_path]), strict=True)
    for before, after in ((load_run(one), load_run(other)) for one, other in pairs):
        assert after.spec == before.spec
        assert after.folder.name == before.folder.name
        old, new = before.outcome(), after.outcome()
        assert (old.spec, old.status, old.diverged_at) == (new.spec, new.status, new.diverged_at)
        assert len(old.rows) == len(new.rows)
        for name in {name for row in old.rows for name in row} - {"seconds"}:
            np.testing.assert_allclose(new.curve(name), old.curve(name), rtol=1e-6)


def test_constant_and_empty_columns_take_no_room(runs: Path, tmp_path: Path) -> None:
    assert archive(runs, tmp_path) == 0
    (table,) = (tmp_path / "runs").glob("synthetic-*.csv")
    header, *lines = table.read_text().splitlines()
    names = header.split(",")
    assert "train_loss" in names
    assert not {"clients", "dropped", "test_accuracy"} & set(names)
    assert [line.split(",")[names.index("train_loss")] == "" for line in lines] == [True, False] * 3
    assert load_run(table.with_suffix(".toml")).rows[3]["clients"] == 20


def test_nothing_of_the_machine_but_its_hardware_is_kept(runs: Path, tmp_path: Path) -> None:
    assert archive(runs, tmp_path) == 0
    environment = json.loads(next(runs.glob("toy-*/environment.json")).read_text())
    (described,) = (tmp_path / "runs").glob("toy-*.toml")
    assert environment["command"] not in described.read_text()
    assert environment["platform"] not in described.read_text()
    assert load_run(described).environment["torch"] == environment["torch"]


@pytest.mark.parametrize(
    ("ending", "old", "new"),
    [
        ("csv", "\n1,", "\n2,"),
        ("toml", "seed = 0", "seed = 2"),
        ("toml", "seconds = ", "seconds = 1"),
    ],
)
def test_a_changed_number_is_refused(
    ending: str, old: str, new: str, runs: Path, tmp_path: Path
) -> None:
    assert archive(runs, tmp_path) == 0
    (path,) = (tmp_path / "runs").glob(f"synthetic-*.{ending}")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match="changed since it was archived"):
        load_run(path.with_suffix(".toml"))


def test_a_run_made_twice_is_not_replaced_in_silence(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert archive(runs, tmp_path) == archive(runs, tmp_path) == 0
    (path,) = (tmp_path / "runs").glob("toy-*.toml")
    other = replace(load_run(path), rows=[{"round": 1, "train_loss": 9.0}])
    described, rounds = texts(other)
    path.write_text(described)
    path.with_suffix(".csv").write_text(rounds)
    capfd.readouterr()
    assert archive(runs, tmp_path) == 2
    assert "--replace" in capfd.readouterr().err
    assert load_run(path).rows[0]["train_loss"] == 9.0
    assert archive(runs, tmp_path, "--replace") == 0
    assert load_run(path).rows[0]["train_loss"] != 9.0


def test_a_note_stays_with_the_runs(runs: Path, tmp_path: Path) -> None:
    assert archive(runs, tmp_path, "--note", "a shared machine") == 0
    assert archive(runs, tmp_path) == 0  # there already: left as they are
    found = [load_run(path).environment["note"] for path in find_runs([tmp_path])]
    assert found == ["a shared machine"] * 2


def test_a_run_that_is_not_over_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (outcome,) = run_all(EXPERIMENTS[1:], root=tmp_path / "runs")
    assert outcome.folder is not None
    (outcome.folder / "result.json").unlink()
    assert archive(tmp_path / "runs", tmp_path / "found") == 0
    assert "is not over (1 of 1 rounds)" in capfd.readouterr().err
    assert not list((tmp_path / "found" / "runs").iterdir())


def test_a_report_shows_archived_runs(runs: Path, tmp_path: Path) -> None:
    assert archive(runs, tmp_path) == 0
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "synthetic-fedexp-s0-" in (tmp_path / "page.html").read_text()
