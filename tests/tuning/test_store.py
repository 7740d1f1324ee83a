"""The study file: locks, settings that must agree, and files that are not studies."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from fedexp.errors import UsageError
from fedexp.tuning.search import Study, tune
from fedexp.tuning.store import StudyLocks
from tests.helpers.tuning import small_study


def test_a_trial_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    one, two = StudyLocks(tmp_path / "s.db"), StudyLocks(tmp_path / "s.db")
    assert one.acquire("a")
    assert not one.acquire("a")
    assert not two.acquire("a")
    assert two.acquire("b")
    one.release("a")
    assert two.acquire("a")
    two.close()
    assert one.acquire("a")
    assert one.acquire("b")
    one.close()
    assert [path.name for path in tmp_path.iterdir()] == [".s.db.lock"]


def test_a_path_may_have_braces(tmp_path: Path) -> None:
    study = small_study(tmp_path / "{lr}.db", values={"local.lr": (0.1,)})
    for _ in range(2):
        with study.open() as store:
            assert store.trials() == []
    assert study.path.exists()


def test_a_study_of_other_data_is_refused(tmp_path: Path) -> None:
    values = {"local.lr": (0.1, 0.01)}
    study = small_study(tmp_path / "s.db", values=values)
    trials = tune(study)
    other = small_study(tmp_path / "s.db", values=values)
    other.run.task.train.fields["y"].mul_(2)
    with pytest.raises(
        UsageError, match=r"study of other content: .*\(y\); choose another --study"
    ):
        tune(other)
    assert tune(small_study(tmp_path / "s.db", values=values)) == trials


def test_options_typed_differently_are_the_same_study(tmp_path: Path) -> None:
    values = {"local.lr": (0.1,)}
    studies = []
    for name, text in (("server.lr", "2"), ("lr", "2.0")):
        spec = small_study(tmp_path / "s.db").run.spec
        run = replace(spec, options=(*spec.options, (name, text))).prepare()
        studies.append(Study(run, "paper", values, tmp_path / "s.db"))
    assert tune(studies[0]) == tune(studies[1])


def remove_fingerprint(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        ((text,),) = file.execute("SELECT value_json FROM study_user_attributes")
        known = {n: v for n, v in json.loads(text).items() if n != "fingerprint"}
        file.execute("UPDATE study_user_attributes SET value_json = ?", (json.dumps(known),))


def test_a_study_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)})
    tune(study)
    remove_fingerprint(tmp_path / "s.db")
    with pytest.raises(UsageError, match=r"its fingerprint cannot be read; .* another --study"):
        tune(study)


def test_a_study_resumes_with_its_own_settings_only(tmp_path: Path) -> None:
    values = {"local.lr": (0.01, 0.1)}
    study = small_study(tmp_path / "s.db", values=values)
    tune(study)
    for other, what in [
        (small_study(study.path, values=values, rounds=13), "rounds is 12 there, 13 here"),
        (small_study(study.path, values={"local.lr": (0.01, 1.0)}), "values is"),
        (small_study(study.path, values=values, seed=1), "seed is 0 there, 1 here"),
        (small_study(study.path, values=values, mode="authors-code"), "mode is"),
    ]:
        with pytest.raises(UsageError, match=what):
            tune(other)
    assert len(tune(small_study(study.path, "scaffold", values=values))) == 2  # a study of its own
    assert len(tune(study)) == 2


def test_a_file_that_is_not_a_study(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)})
    study.path.write_text("not a database, but long enough to be taken for one\n" * 50)
    with pytest.raises(UsageError, match=r"cannot use .*choose another --study"):
        tune(study)
    with pytest.raises(UsageError, match="cannot write"):
        tune(replace(study, path=Path("/proc/nothing/s.db")))


def test_a_creation_that_was_interrupted_leaves_no_study(tmp_path: Path) -> None:
    """A table without its index would accept two studies of one name, and then none."""
    index = "ix_studies_study_name"

    def interrupt(*execution: Any) -> None:
        if index in execution[2]:
            raise KeyboardInterrupt

    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)})
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            tune(study)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", interrupt)
    assert len(tune(study)) == 1
    with closing(sqlite3.connect(study.path)) as file:
        found = file.execute("SELECT name FROM sqlite_master WHERE name = ?", (index,))
        assert found.fetchall() == [(index,)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.db.lock", "s.db"]


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'fedexp\[tune\]'"):
        tune(small_study(tmp_path / "s.db"))


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match=r"cannot lock .*not supported; choose another --study"):
        tune(small_study(tmp_path / "s.db"))
