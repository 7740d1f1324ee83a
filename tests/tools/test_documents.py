"""Documents, tables and figures are those of the stored runs; the scripts that make them run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.algorithm_pages import report as pages
from tools.algorithm_pages.figure import figure
from tools.eps_study import report as eps_report
from tools.leaderboard import report as board_report
from tools.leaderboard.measures import load_board
from tools.leaderboard.protocol import ENTRIES, SEEDS, SMALL, TASKS, TRIALS
from tools.leaderboard.runs import Store
from tools.results import __main__ as script
from tools.results import documents
from tools.results.archive import Archive
from tools.results.documents import (
    ABOUT,
    APPENDIX,
    ARCHIVE,
    BLOCKS,
    DIFFERS,
    DOCUMENT,
    DOCUMENTS,
    HALF,
    LEADERBOARD,
    PAGES,
    fill,
    generate,
    loose_numbers,
    stale,
)

from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError

ROOT = Path(__file__).parents[2]
LIMIT = 8_000_000  # bytes of the whole archive, about 40 kB per run of 500 rounds


@pytest.fixture(scope="module")
def made() -> Mapping[Path, str]:
    return generate(ROOT)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with the runs of the synthetic regression alone."""

    def others(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not name.startswith("synthetic-")]

    shutil.copytree(ROOT / ARCHIVE / "runs", tmp_path / ARCHIVE / "runs", ignore=others)
    for name in (*DOCUMENTS, *PAGES.values()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    documents.write(tmp_path, generate(tmp_path))
    return tmp_path


def spoil(path: Path, pattern: str) -> None:
    """Change the digit at the end of what the pattern matches."""
    text = path.read_text()
    match = re.search(pattern, text, re.DOTALL)
    assert match
    at = match.end() - 1
    path.write_text(f"{text[:at]}{9 - int(text[at])}{text[at + 1 :]}")


def test_all_generated_files_are_up_to_date(made: Mapping[Path, str]) -> None:
    problems = stale(ROOT, made)
    assert not problems, "; ".join(problems)


def test_the_script_checks_all_files(
    made: Mapping[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**made, APPENDIX: f"{made[APPENDIX]}\n"}
    monkeypatch.setattr(sys, "argv", ["results", "--check"])
    for files, status, line in ((made, 0, "files agree with results/runs"), (changed, 1, DIFFERS)):
        monkeypatch.setattr(script, "generate", lambda root, files=files: files)
        assert script.main() == status
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (APPENDIX, r"begin study-synthetic.*?\| FedExP \| \d"),
        (ARCHIVE / "synthetic" / "figure.svg", r'd="M \d'),
    ],
)
def test_a_number_changed_by_hand_is_reported_and_restored(
    name: Path, pattern: str, small: Path
) -> None:
    before = (small / name).read_text()
    spoil(small / name, pattern)
    again = generate(small)
    assert stale(small, again) == [f"{name}: {DIFFERS}"]
    documents.write(small, again)
    assert (small / name).read_text() == before


def test_lost_and_changed_runs_are_reported(small: Path) -> None:
    first, *rest = sorted((small / ARCHIVE / "runs").glob("synthetic-fedexp-*.csv"))
    text = first.read_text()
    spoil(first, r"\n1,\d")
    with pytest.raises(UsageError, match="changed since it was archived"):
        generate(small)
    first.write_text(text)
    first.with_suffix(".toml").unlink()
    assert f"{first.relative_to(small)}: {HALF}" in stale(small, generate(small))
    for path in (first, *rest, *(path.with_suffix(".toml") for path in rest)):
        path.unlink()
    again = generate(small)
    table = f"{ARCHIVE / 'synthetic' / 'table.md'}: no run of the archive leads to it"
    assert {f"{APPENDIX}: {DIFFERS}", table} <= set(stale(small, again))
    assert "begin study-synthetic -->\nNo runs yet." in again[APPENDIX]


@pytest.mark.parametrize("document", [DOCUMENT, APPENDIX, ABOUT], ids=str)
def test_hand_written_text_has_no_numbers(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert not loose_numbers(text)
    line = "It reached the target after 312 rounds."
    assert loose_numbers(f"{text}\n{line}\n") == [line]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin x -->\n<!-- end x -->\n<!-- begin y -->\n", "begin y --> has no other end"),
        ("<!-- begin z -->\n<!-- end z -->", "unknown block 'z'"),
    ],
)
def test_marks_come_in_pairs_and_have_a_block(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fill(text, {"x": "1", "y": "2"})


def test_the_archive_is_small_and_names_no_folder_of_a_machine() -> None:
    files = [path for path in (ROOT / ARCHIVE).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT
    described = [path.read_text() for path in files if path.suffix == ".toml"]
    assert described
    assert not [text for text in described if re.search(r"(/tmp|/home|/work|/root)\b", text)]


def test_without_runs_every_block_has_a_text(tmp_path: Path) -> None:
    assert all(make(Archive(())) for make in BLOCKS.values())
    assert all(eps_report.blocks(tmp_path).values())
    board = load_board(tmp_path)
    assert all(board_report.blocks(board).values())
    assert eps_report.figure(tmp_path) is board_report.figure(board) is None
    assert pages.page_blocks("fedams", {})["results"] == "No runs yet."
    assert figure("fedams", {}) is None


def test_every_algorithm_has_a_page_with_all_sections(tmp_path: Path) -> None:
    names = {path.stem for path in (ROOT / pages.FOLDER).glob("*.md")}
    assert names == {*ALGORITHMS, pages.DELTA}
    for name, text in pages.read_pages(ROOT).items():
        assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == pages.SECTIONS, name
        bodies = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
        assert all(len(body.split()) > 8 for body in bodies), name
        assert pages.summary(text).endswith("."), name
        assert pages.title(text) in pages.own_rows(name)[0].title
    with pytest.raises(UsageError, match=r"fedavg\.md is missing; write it with the sections Form"):
        pages.read_pages(tmp_path)


def test_the_stored_rows_are_those_of_the_protocol() -> None:
    """Every algorithm has a row, all rows have the same budget, and runs have the best values."""
    assert {entry.algorithm for entry in ENTRIES.values()} == set(ALGORITHMS)
    for entry in ENTRIES.values():
        points = [{tuple(p.items()) for p in entry.points(task)} for task in SMALL]
        assert {len(distinct) for distinct in points} == {TRIALS}
    for name in TASKS:
        store = Store.load(name, ROOT / LEADERBOARD)
        assert all(trial.point in ENTRIES[trial.row].points(name) for trial in store.trials)
        assert len({(run.row, run.seed) for run in store.runs}) == len(store.runs)
        for run in store.runs:
            assert run.seed in SEEDS
            assert run.point == store.best(ENTRIES[run.row])
