"""A stored run is only returned, or continued, where it is made from what today's command is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedexp as fx
from fedexp.distributed import Ranks
from fedexp.runs import execute, load_run, read_spec, run_id
from fedexp.runs.distributed_run import check_same_content
from fedexp.runs.fingerprint import Fingerprint, fingerprint
from fedexp.runs.folder import FINGERPRINT
from fedexp.runs.spec import Run, Spec, frozen
from fedexp.tasks import Task
from tests.helpers.studies import STUDY, imported, task_of
from tests.runs.helpers import nobody, stop_after, tiny, untimed

MINE = Spec("mine", "fedavg", rounds=3)
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


def run_of(task: Task, spec: Spec = MINE) -> Run:
    return spec.prepare(task)


@pytest.mark.parametrize("name", CHANGES)
def test_a_finished_run_of_other_content_is_no_answer(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    root = tmp_path / "runs"
    first = execute(MINE, root, nobody, run=run_of(plain(tmp_path)))
    again = execute(MINE, root, nobody, run=run_of(plain(tmp_path)))
    assert again.stored == 3
    other = run_of(change(tmp_path))
    with pytest.raises(fx.UsageError, match=words) as refused:
        execute(MINE, root, nobody, run=other)
    assert "\n" not in str(refused.value)
    assert "--restart discards it" in str(refused.value)
    assert first.folder is not None
    assert untimed(load_run(first.folder).rows) == untimed(first.rows)  # to read it is no question
    fresh = execute(MINE, root, nobody, run=other, restart=True)
    assert untimed(fresh.rows) == untimed(execute(MINE, None, nobody, run=other).rows)
    assert untimed(fresh.rows) != untimed(first.rows)
    with pytest.raises(fx.UsageError, match=words):
        execute(MINE, root, nobody, run=run_of(plain(tmp_path)))


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupted_run_is_not_continued_with_other_content(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    folder = tmp_path / "run"
    listen, stop = stop_after(1)
    with pytest.raises(fx.runs.RunInterrupted):
        execute(MINE, None, listen, run=run_of(plain(tmp_path)), folder=folder, stop=stop)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(fx.UsageError, match=words):
        execute(MINE, None, nobody, run=run_of(change(tmp_path)), folder=folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(execute(MINE, None, nobody, run=run_of(plain(tmp_path)), folder=folder).rows) == 3


def test_a_run_that_has_stored_nothing_yet_takes_other_content(tmp_path: Path) -> None:
    """It was killed before its first checkpoint, or in the middle of a restart."""
    folder = tmp_path / "run"
    execute(MINE, None, nobody, run=run_of(plain(tmp_path)), folder=folder)
    for path in (*folder.glob("checkpoint*"), folder / "result.json"):
        path.unlink()
    other = run_of(other_labels(tmp_path))
    outcome = execute(MINE, None, nobody, run=other, folder=folder)
    assert untimed(outcome.rows) == untimed(execute(MINE, None, nobody, run=other).rows)
    assert execute(MINE, None, nobody, run=other, folder=folder).stored == 3


def test_an_older_numerics_version_is_refused(tmp_path: Path) -> None:
    execute(tiny(), None, nobody, folder=tmp_path)
    path = tmp_path / FINGERPRINT
    path.write_text(path.read_text().replace('"numerics": 3', '"numerics": 1'))
    with pytest.raises(fx.UsageError, match=r"numerics version of fedexp \(1 and 3\) differs"):
        execute(tiny(), None, nobody, folder=tmp_path)


def test_a_damaged_fingerprint_is_one_line(tmp_path: Path) -> None:
    execute(tiny(), None, nobody, folder=tmp_path)
    for text in (b"", b"{}", b"[1]", b'{"format": 1, "numerics": 3, "digests": 3}', b"\xff"):
        (tmp_path / FINGERPRINT).write_bytes(text)
        with pytest.raises(fx.UsageError, match=r"fingerprint.json is damaged; --restart"):
            execute(tiny(), None, nobody, folder=tmp_path)
    execute(tiny(), None, nobody, folder=tmp_path, restart=True)
    assert execute(tiny(), None, nobody, folder=tmp_path).stored == 6


def test_a_run_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    execute(tiny(), None, nobody, folder=tmp_path)
    (tmp_path / FINGERPRINT).unlink()
    with pytest.raises(fx.UsageError, match=r"cannot read .*fingerprint.json: No such.*--restart"):
        execute(tiny(), None, nobody, folder=tmp_path)
    execute(tiny(), None, nobody, folder=tmp_path, restart=True)
    assert execute(tiny(), None, nobody, folder=tmp_path).stored == 6


def test_the_content_is_read_once_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*what: Any) -> Fingerprint:
        calls.append(1)
        return fingerprint(*what)

    monkeypatch.setattr("fedexp.runs.spec.fingerprint", counted)
    execute(tiny(), tmp_path, nobody)
    assert len(calls) == 1
    execute(tiny(), tmp_path, nobody)
    assert len(calls) == 2
    execute(tiny(), None, nobody)
    assert len(calls) == 2


class Alike(Ranks):
    """The second of two ranks, of which the first has another run."""

    rank, world_size = 1, 2

    def __init__(self, first: Run) -> None:
        self.first_run, self.asked = first, 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value if self.asked == 1 else self.first_run.fingerprint, value]


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    mine = run_of(plain(tmp_path))
    check_same_content(mine, Alike(run_of(plain(tmp_path))))
    with pytest.raises(fx.UsageError, match=r"rank 1 has other content than rank 0: .*\(y\)"):
        check_same_content(mine, Alike(run_of(other_labels(tmp_path))))


TYPED = ["eps=0", "eps=0.0", "server.eps=0", "server.eps=-0.0", "eps=0e5"]


def typed(text: str) -> Spec:
    name, _, value = text.partition("=")
    return replace(tiny("fedexp"), options=(*tiny().options, (name, value)))


def test_options_that_mean_the_same_are_one_run(tmp_path: Path) -> None:
    assert len({run_id(typed(text).prepare()) for text in TYPED}) == 1
    assert run_id(typed("eps=0").prepare()) == run_id(tiny("fedexp").prepare())  # the task's value
    assert run_id(typed("eps=0.5").prepare()) != run_id(tiny("fedexp").prepare())
    assert run_id(typed("task.normalize=yes").prepare()) == run_id(tiny("fedexp").prepare())
    assert run_id(typed("task.normalize=no").prepare()) != run_id(tiny("fedexp").prepare())
    execute(typed("eps=0"), tmp_path, nobody)
    outcome = execute(typed("server.eps=0.0"), tmp_path, nobody)
    assert outcome.stored == 6
    assert len(list(tmp_path.iterdir())) == 1
    assert outcome.folder is not None
    assert read_spec(outcome.folder)["set"]["eps"] == "0"  # as it was typed at the beginning


def test_the_cohorts_one_and_one_hundred_percent_are_two_runs(tmp_path: Path) -> None:
    one, all_ = replace(tiny(), cohort=1), replace(tiny(), cohort=1.0)
    assert run_id(all_.prepare()) == run_id(replace(tiny(), cohort="all").prepare())
    outcome = execute(one, tmp_path, nobody)
    assert outcome.folder is not None
    assert run_id(one.prepare()) == outcome.folder.name != run_id(all_.prepare())


def test_the_frozen_spec_has_every_argument_of_the_task() -> None:
    assert frozen(tiny().prepare())["arguments"] == {
        "clients": 4, "rows": 3, "dim": 20, "normalize": True,
    }  # fmt: skip
    seeded = replace(tiny(), options=(("task.seed", "5"),))
    assert frozen(seeded.prepare())["arguments"]["seed"] == 5
    assert frozen(Spec("digits", "fedavg").prepare())["arguments"]["model"] == "logistic"


def test_the_spec_names_the_options_that_change_something() -> None:
    own = ["task.clients", "task.rows", "task.dim"]
    assert frozen(typed("eps=0").prepare())["changed"] == own
    assert frozen(typed("eps=0.5").prepare())["changed"] == [*own, "server.eps"]
    assert frozen(Spec("toy", "fedavg").prepare())["changed"] == []
    assert frozen(Spec("toy", "fedavg", mode="authors-code").prepare())["changed"] == []


def test_a_run_says_what_it_was_made_from(tmp_path: Path) -> None:
    outcome = execute(tiny(), tmp_path, nobody)
    assert outcome.folder is not None
    stored = json.loads((outcome.folder / FINGERPRINT).read_text())
    assert stored == tiny().prepare().fingerprint.to_json()
    assert {"the initial weights", "the objective", "the training data (x)"} <= set(
        stored["digests"]
    )
