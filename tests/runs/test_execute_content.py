"""A stored run is only returned, or continued, where it is made from what today's command is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedexp as fx
from fedexp.catalogue import TASKS
from fedexp.distributed import Ranks
from fedexp.experiment import Experiment
from fedexp.runs import execute, folder_of, load_run, run_all
from fedexp.runs.distributed_run import check_same_content
from fedexp.runs.fingerprint import NUMERICS, Fingerprint, fingerprint, fingerprint_of
from fedexp.runs.folder import FINGERPRINT
from fedexp.tasks import Task
from tests.helpers.studies import STUDY, imported, task_of
from tests.runs.helpers import execute_in, interrupted, tiny, untimed

Change = Callable[[Path], Task]


def plain(folder: Path) -> Task:
    return task_of(imported(folder, STUDY))


def other_labels(folder: Path) -> Task:
    task = plain(folder)
    y = task.train.fields["y"]
    y.copy_(1 - y)
    return task


def other_test_data(folder: Path) -> Task:
    task = plain(folder)
    assert task.test is not None
    task.test["x"].add_(1)
    return task


def other_activation(folder: Path) -> Task:
    return task_of(imported(folder, STUDY.replace("torch.relu(", "F.gelu(")))


def other_loss(folder: Path) -> Task:
    return task_of(imported(folder, STUDY.replace('reduction="none")', 'reduction="none") * 3')))


CHANGES: dict[str, tuple[Change, str]] = {
    "labels": (other_labels, r"the training data \(y\) differs"),
    "test data": (other_test_data, r"the test data \(x\) differs"),
    "activation": (other_activation, "the code or the layers of the model differs"),
    "loss": (other_loss, "the loss differs"),
}


def run_of(task: Task) -> Experiment:
    return Experiment(task, "fedavg", rounds=3)


@pytest.mark.parametrize("name", CHANGES)
def test_a_finished_run_of_other_content_is_no_answer(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    folder = tmp_path / "run"
    first = execute_in(folder, run_of(plain(tmp_path)))
    again = execute_in(folder, run_of(plain(tmp_path)))
    assert again.stored == 3
    other = run_of(change(tmp_path))
    assert other.id == run_of(plain(tmp_path)).id
    with pytest.raises(fx.UsageError, match=words) as refused:
        execute_in(folder, other)
    assert "\n" not in str(refused.value)
    assert untimed(load_run(folder).rows) == untimed(first.rows)  # to read it is no question
    fresh = execute_in(folder, other, restart=True)
    assert untimed(fresh.rows) == untimed(execute(other).rows)
    assert untimed(fresh.rows) != untimed(first.rows)
    with pytest.raises(fx.UsageError, match=words):
        execute_in(folder, run_of(plain(tmp_path)))


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupted_run_is_not_continued_with_other_content(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    folder = tmp_path / "run"
    interrupted(run_of(plain(tmp_path)), folder, 1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(fx.UsageError, match=words):
        execute_in(folder, run_of(change(tmp_path)))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(execute_in(folder, run_of(plain(tmp_path))).rows) == 3


def test_a_run_that_has_stored_nothing_yet_takes_other_content(tmp_path: Path) -> None:
    """It was killed before its first checkpoint, or in the middle of a restart."""
    folder = tmp_path / "run"
    execute_in(folder, run_of(plain(tmp_path)))
    for path in (*folder.glob("checkpoint*"), folder / "result.json"):
        path.unlink()
    other = run_of(other_labels(tmp_path))
    outcome = execute_in(folder, other)
    assert untimed(outcome.rows) == untimed(execute(other).rows)
    assert execute_in(folder, other).stored == 3


def test_an_older_numerics_version_is_refused(tmp_path: Path) -> None:
    execute_in(tmp_path, tiny())
    path = tmp_path / FINGERPRINT
    path.write_text(path.read_text().replace(f'"numerics": {NUMERICS}', '"numerics": 1'))
    line = rf"numerics version of fedexp \(1 and {NUMERICS}\) differs"
    with pytest.raises(fx.UsageError, match=line):
        execute_in(tmp_path, tiny())


def test_a_damaged_fingerprint_is_one_line(tmp_path: Path) -> None:
    execute_in(tmp_path, tiny())
    for text in (b"", b"{}", b"[1]", b'{"format": 1, "numerics": 3, "digests": 3}', b"\xff"):
        (tmp_path / FINGERPRINT).write_bytes(text)
        with pytest.raises(fx.UsageError, match=r"fingerprint.json is damaged"):
            execute_in(tmp_path, tiny())
    execute_in(tmp_path, tiny(), restart=True)
    assert execute_in(tmp_path, tiny()).stored == 6


def test_a_run_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    execute_in(tmp_path, tiny())
    (tmp_path / FINGERPRINT).unlink()
    with pytest.raises(fx.UsageError, match=r"cannot read .*fingerprint.json: No such"):
        execute_in(tmp_path, tiny())
    execute_in(tmp_path, tiny(), restart=True)
    assert execute_in(tmp_path, tiny()).stored == 6


def test_the_content_is_read_once_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*what: Any) -> Fingerprint:
        calls.append(1)
        return fingerprint(*what)

    monkeypatch.setattr("fedexp.runs.fingerprint.fingerprint", counted)
    execute_in(tmp_path, tiny())
    assert len(calls) == 1
    execute_in(tmp_path, tiny())
    assert len(calls) == 2
    execute(tiny())
    assert len(calls) == 2


def test_runs_of_a_comparison_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    experiments = [Experiment("mine", name, rounds=3) for name in ("fedavg", "fedexp")]
    monkeypatch.setitem(TASKS, "mine", lambda: plain(tmp_path))
    first = run_all(experiments, root=root)
    assert [outcome.stored for outcome in run_all(experiments, root=root)] == [3, 3]
    monkeypatch.setitem(TASKS, "mine", lambda: other_labels(tmp_path))
    with pytest.raises(fx.UsageError, match=r"training data \(y\) differs"):
        run_all(experiments, root=root)
    again = run_all(experiments, root=root, restart=True)
    assert [outcome.stored for outcome in again] == [0, 0]
    assert untimed(again[0].rows) != untimed(first[0].rows)
    # what is not there yet is no mistake, where many are restarted
    fresh = run_all([experiments[0].replace(seed=1)], root=root, restart=True)
    assert len(fresh[0].rows) == 3


class Alike(Ranks):
    """The second of two ranks, of which the first has another run."""

    rank, world_size = 1, 2

    def __init__(self, first: Experiment) -> None:
        self.first, self.asked = fingerprint_of(first), 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value if self.asked == 1 else self.first, value]


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    mine = run_of(plain(tmp_path))
    check_same_content(mine, Alike(run_of(plain(tmp_path))))
    with pytest.raises(fx.UsageError, match=r"rank 1 has other content than rank 0: .*\(y\)"):
        check_same_content(mine, Alike(run_of(other_labels(tmp_path))))


def test_options_that_mean_the_same_are_one_run(tmp_path: Path) -> None:
    for name, value in (("eps", "0"), ("server.eps", "-0.0")):
        experiment = tiny("fedexp", options={name: value})
        outcome = execute_in(folder_of(experiment, tmp_path), experiment)
    assert outcome.stored == 6
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_stores_what_it_was_made_from(tmp_path: Path) -> None:
    execute_in(tmp_path, tiny())
    stored = json.loads((tmp_path / FINGERPRINT).read_text())
    assert stored == fingerprint_of(tiny()).to_json()
    assert {"the initial weights", "the objective", "the training data (x)"} <= set(
        stored["digests"]
    )
