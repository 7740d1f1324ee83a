"""References: objects of a user's own files are found, and mistakes get one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.references import in_session, load_object, reference_to
from tests.helpers.own_study import write_study


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_an_object_of_a_file_is_imported_once(tmp_path: Path) -> None:
    write_study(tmp_path)
    task = load_object("study.py:task")
    assert isinstance(task, fx.tasks.Task)
    assert load_object("study.py:task") is task
    assert load_object(f"{tmp_path}/study.py:task") is task
    assert load_object("study.py:mine.server.lr") == 0.01
    assert reference_to(task, "mine") == "study.py:task"


def test_an_object_of_a_module_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "own_package").mkdir()
    write_study(tmp_path / "own_package", name="study_module.py")
    task = load_object("own_package.study_module:task")
    assert task.name == "mine"
    assert reference_to(task, "mine") == "own_package.study_module:task"


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "neighbour_of_study.py").write_text("VALUE = 3\n")
    text = "def late():\n    from neighbour_of_study import VALUE\n    return VALUE\n"
    (tmp_path / "deep" / "own.py").write_text(text)
    assert load_object("deep/own.py:late")() == 3


def test_a_name_of_a_script_alone_gets_the_remedy(tmp_path: Path) -> None:
    guarded = 'if __name__ == "__main__":\n    own_task = make()\n'
    write_study(tmp_path, guarded, "guarded.py")
    with pytest.raises(UsageError, match=r"guarded\.py does not define own_task.*move it out"):
        load_object("guarded.py:own_task")
    with pytest.raises(UsageError, match=r"unknown name in guarded\.py 'own_tas'"):
        load_object("guarded.py:own_tas")


def test_what_no_other_process_can_import_is_of_this_session() -> None:
    here = fx.Algorithm("here", server=fx.Average(0.5))
    other = fx.Algorithm("here", server=fx.Average(0.25))
    reference = reference_to(here, "here")
    assert in_session(reference)
    assert load_object(reference) is here
    assert reference_to(here, "here") == reference
    assert load_object(reference_to(other, "here")) is other
    with pytest.raises(UsageError, match=r"session that has ended; continue it from Python"):
        load_object("session:gone")


@pytest.mark.parametrize(
    ("reference", "text", "line"),
    [
        ("absent.py:task", None, "there is no file absent.py; give its path"),
        ("own.py:tsk", "task = 1", "unknown name in own.py 'tsk'; did you mean task?"),
        ("own.py:task", "import math\n1 / 0", "own.py, line 2 raised ZeroDivisionError: division"),
        ("own.py:task", "x = (", "own.py, line 1 raised SyntaxError"),
        ("own.py:task", "import not_there", "raised ModuleNotFoundError: No module named"),
        ("no_such_module:task", None, "no_such_module raised ModuleNotFoundError"),
        (":task", None, "names no object; write study.py:task"),
    ],
)
def test_a_mistake_gets_one_line(
    tmp_path: Path, reference: str, text: str | None, line: str
) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text + "\n")
    with pytest.raises(UsageError) as raised:
        load_object(reference)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_starts_runs_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path, "fx.compare(task, ['fedavg'], runs=None)\n")
    with pytest.raises(UsageError, match=r"study.py calls fedexp.compare while it is imported"):
        load_object("study.py:task")
