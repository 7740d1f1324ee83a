"""`fedexp reproduce`: the list, what is printed first, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedexp.cli.main import main
from fedexp.reproduce import STUDIES


def test_shrinking_is_reported_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "synthetic", "--rounds", "3", "--jobs", "1"]
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*command, *where]) == 0
    out, err = capfd.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith("SHRUNK, so the published figures are not comparable line by line")
    assert second == "  3 rounds instead of 200"
    assert "SHRUNK" in err.splitlines()[0]
    assert (tmp_path / "out" / "table.md").read_text().startswith("> SHRUNK")
    assert (tmp_path / "out" / "table.csv").read_text().splitlines()[1].endswith(",no")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["shrunk"], summary["comparable"]) == (["3 rounds instead of 200"], False)


def test_the_list_names_every_study_with_its_cost(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    out, _ = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:-2:2]] == list(STUDIES)
    assert "210 runs of 500 rounds" in out


def test_archived_runs_are_reused_and_the_others_executed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "synthetic", "--rounds", "3", "--jobs", "1", "--quiet"]
    first, archive = tmp_path / "first", tmp_path / "archive"
    assert main([*command, "--runs", str(first), "--out", str(tmp_path / "a")]) == 0
    gone = next(first.glob("synthetic-scaffold-*"))
    shutil.rmtree(gone)
    assert main(["archive", str(first), "--to", str(archive)]) == 0
    second = ["--runs", str(tmp_path / "second"), "--out", str(tmp_path / "b")]
    assert main([*command, *second, "--reuse", str(archive)]) == 0
    assert "3 of 4 runs are taken from" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "second").iterdir()] == [gone.name]
    assert (tmp_path / "a" / "table.md").read_text() == (tmp_path / "b" / "table.md").read_text()
    other = [*command, "--runs", str(tmp_path / "third"), "--out", str(tmp_path / "c")]
    assert main([*other, "--reuse", str(archive), "--rounds", "2"]) == 0
    assert "0 of 4 runs are taken from" in capfd.readouterr().err
    assert main([*command, "--from", str(archive), "--reuse", str(archive)]) == 2
    assert "leave --reuse out" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "--list names them all"),
        (["tabel1"], "did you mean table1?"),
        (["toy", "--task", "emnist"], "unknown task of toy"),
        (["table1", "--task", "mnist"], "did you mean emnist?"),
        (["table1"], "fedexp data fetch emnist"),
        (["momentum", "--task", "cifar100"], "fedexp data fetch cifar100"),
        (["toy", "--out", "/dev/null/x"], "choose another --out"),
    ],
)
def test_mistakes_get_one_line_with_a_remedy(
    arguments: list[str],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    _, err = capfd.readouterr()
    assert remedy in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
