"""Studies survive: killed or stopped, they go on, with no point lost and none repeated."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedexp.errors import UsageError
from fedexp.runs import RunWarning
from fedexp.tune.grids import Point, points
from fedexp.tune.search import OnRow, Study, tune
from fedexp.tune.trial import Row
from tests.studies.problems import SMALL, small_study


class Watcher:
    """Counts what a study runs, and may stop it in the middle of a trial."""

    def __init__(self, stop_in_trial: int = 0) -> None:
        self.left = 0
        self.begun: list[Point] = []
        self._stop_in_trial = stop_in_trial

    @contextmanager
    def __call__(self, left: int) -> Iterator[OnRow]:
        self.left = left
        yield self._on_row

    def _on_row(self, point: Point, row: Row) -> None:
        if row["round"] == 1:
            self.begun.append(point)
        if len(self.begun) == self._stop_in_trial and row["round"] == 2:
            raise KeyboardInterrupt


def tried_points(study: Study) -> list[Point]:
    with study.opened() as ledger:
        return [each.point for each in ledger.tried()]


def test_a_grid_is_tried_once_and_then_remembered(tmp_path: Path) -> None:
    values = {"server.lr": (1.0, 10.0), "local.lr": (0.1, 0.01, 5.0)}
    study = small_study(tmp_path / "with space" / "s.db", values=values, rounds=30)
    first, second = Watcher(), Watcher()
    tried = tune(study, watching=first)
    assert first.begun == points(study.values)
    assert tune(study, watching=second) == tried
    assert second.begun == []
    scores = [each.scored.score for each in tried]
    assert scores == sorted(scores)
    assert tried[0].point in points(study.values)
    assert [each.scored.diverged_at is None for each in tried] == [True] * 4 + [False] * 2


def test_killed_in_the_middle_a_grid_goes_on(tmp_path: Path) -> None:
    """SIGKILL with two workers: they end as well; every point is there once, the best the same."""
    study = small_study(tmp_path / "killed.db", rounds=60)
    options = [word for pair in SMALL.items() for word in ("--set", "=".join(pair))]
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "60", "--jobs", "2", "--study", str(study.path), *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while _stored(study.path) < 4:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.02)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _stored(study.path)
    assert before < study.size, "nothing was left to do"
    watcher = Watcher()
    tried = tune(study, watching=watcher)
    assert watcher.left == len(watcher.begun) == study.size - before
    assert sorted(map(str, tried_points(study))) == sorted(map(str, points(study.values)))
    assert tune(replace(study, path=tmp_path / "whole.db")) == tried
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def _stored(path: Path) -> int:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            query = "select count(*) from trials where state = 'COMPLETE'"
            return int(database.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # not made yet


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_stopped_in_a_trial_a_free_search_tries_that_point_again(tmp_path: Path) -> None:
    ranges = {"server.lr": (1.0, 30.0), "local.lr": (0.01, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=8)
    stopped, again = Watcher(stop_in_trial=3), Watcher()
    with pytest.raises(KeyboardInterrupt):
        tune(study, watching=stopped)
    assert len(tried_points(study)) == 2
    tried = tune(study, watching=again)
    assert again.begun[0] == stopped.begun[-1]
    assert len(tried) == 8
    assert len({str(each.point) for each in tried}) == 8
    assert stopped.begun[0] == {"server.lr": 10.0, "local.lr": 0.1}  # the task's own come first
    assert len(tune(replace(study, trials=10), watching=again)) == 10  # more can be asked for


def test_a_free_search_gives_up_what_falls_behind(tmp_path: Path) -> None:
    ranges = {"server.lr": (0.003, 30.0), "local.lr": (0.001, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=16, rounds=24)
    tried = tune(study)
    assert any(each.scored.pruned for each in tried)
    assert not tried[0].scored.pruned
    for each in tried:
        assert 0.003 <= each.point["server.lr"] <= 30
        assert 0.001 <= each.point["local.lr"] <= 0.1


def test_scores_of_other_data_are_no_answer(tmp_path: Path) -> None:
    values = {"local.lr": (0.1, 0.01)}
    study = small_study(tmp_path / "s.db", values=values)
    tried = tune(study)
    other = small_study(tmp_path / "s.db", values=values)
    other.run.task.train.fields["y"].mul_(2)
    with pytest.raises(
        UsageError, match=r"study of other content: .*\(y\); choose another --study"
    ):
        tune(other)
    assert tune(small_study(tmp_path / "s.db", values=values)) == tried


def test_options_typed_in_another_way_are_the_same_study(tmp_path: Path) -> None:
    values = {"local.lr": (0.1,)}
    studies = []
    for name, text in (("server.lr", "2"), ("lr", "2.0")):
        spec = small_study(tmp_path / "s.db").run.spec
        run = replace(spec, options=(*spec.options, (name, text))).prepare()
        studies.append(Study(run, "paper", values, tmp_path / "s.db"))
    assert tune(studies[0]) == tune(studies[1])


def older(path: Path) -> None:
    """Make a study what the version before fingerprints left."""
    with closing(sqlite3.connect(path)) as file, file:
        ((text,),) = file.execute("SELECT value_json FROM study_user_attributes")
        known = {n: v for n, v in json.loads(text).items() if n not in ("fingerprint", "arguments")}
        file.execute("UPDATE study_user_attributes SET value_json = ?", (json.dumps(known),))


def test_a_study_without_a_fingerprint_goes_on_with_a_warning(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)})
    tried = tune(study)
    older(tmp_path / "s.db")
    with pytest.warns(RunWarning, match=r"before studies had fingerprints.*choose another --study"):
        assert tune(study) == tried


def test_a_study_goes_on_under_its_own_terms_only(tmp_path: Path) -> None:
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


def test_a_file_that_is_no_study(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1,)})
    study.path.write_text("not a database, but long enough to be taken for one\n" * 50)
    with pytest.raises(UsageError, match=r"cannot use .*choose another --study"):
        tune(study)
    with pytest.raises(UsageError, match="cannot write"):
        tune(replace(study, path=Path("/proc/nothing/s.db")))


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'fedexp\[tune\]'"):
        tune(small_study(tmp_path / "s.db"))


def test_a_worker_that_fails_is_told(tmp_path: Path) -> None:
    """A spec that only shows its mistake when it runs ends the search, with its own words."""
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1, 0.01)})
    wrong = replace(study.run.spec, options=(*study.run.spec.options, ("task.clients", "none")))
    broken = replace(study, run=replace(study.run, spec=wrong))
    with pytest.raises(UsageError, match=r"task\.clients must be a whole number"):
        tune(broken, jobs=2)
