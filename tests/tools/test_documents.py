"""Documents, tables and figures are those of the stored runs; the scripts that make them run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.algorithm_pages import report as pages
from tools.algorithm_pages.figure import figure
from tools.eps_study import protocol as eps_protocol
from tools.eps_study import report as eps_report
from tools.eps_study.__main__ import main as eps_main
from tools.eps_study.protocol import StudyTask
from tools.leaderboard import report as board_report
from tools.leaderboard import runs as board_runs
from tools.leaderboard.__main__ import main as board_main
from tools.leaderboard.protocol import ENTRIES, SEEDS, SMALL, TASKS, TRIALS, BoardTask
from tools.leaderboard.runs import Store
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
from fedexp.tasks import digits, synthetic

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
    assert all(board_report.blocks(tmp_path).values())
    assert eps_report.figure(tmp_path) is board_report.figure(tmp_path) is None
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


TINY_BOARD = BoardTask(
    "digits",
    "tiny digits",
    lambda seed: digits(clients=5, seed=seed),
    targets=(0.3, 0.99),
    rounds=6,
    evaluate_every=2,
    cohort=2,
    local_lr=(-1, -0.5, 0),
)


def test_a_row_of_the_leaderboard_is_run_once_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TASKS, "digits", TINY_BOARD)
    monkeypatch.setattr(board_runs, "ROUNDS", 12)
    command = ["--algorithm", "fedexp", "--task", "digits", "--out", str(tmp_path)]
    assert board_main([*command, "--seconds", "-1"]) == 0
    assert not list(tmp_path.iterdir())
    assert board_main(command) == 0
    store = Store.load("digits", tmp_path)
    assert len(store.trials) == TRIALS
    best = max(store.trials, key=lambda trial: trial.score)
    assert [(run.seed, run.point) for run in store.runs] == [(s, best.point) for s in SEEDS]
    assert len(store.runs[0].values) == 3
    assert store.runs[0].bytes_up == store.runs[0].bytes_down == 2 * 650 * 4
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(files) == ["digits-tuning.csv", "digits.csv"]
    store.trials.pop(3)
    store.runs.pop(1)
    store.write()
    capsys.readouterr()
    assert board_main(command) == 0
    trial, run = capsys.readouterr().out.splitlines()
    assert "score" in trial
    assert "seed 1" in run
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert "| FedExP, recommended |" in board_report.blocks(tmp_path)["board-tables"]
    assert board_main(["--algorithm", "fedxp"]) == 1
    assert "did you mean fedexp" in capsys.readouterr().err


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


def test_the_eps_study_is_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = StudyTask(
        "synthetic",
        True,
        lambda seed: synthetic(clients=4, rows=2, dim=20, seed=seed),
        target=1e-2,
        budget=60,
        evaluate_every=2,
        seeds=(0,),
        grid=((0.1, 0), (0.1, 2)),
        absolute=lambda lr: (0.0, 0.1),
        metric="train_loss",
    )
    monkeypatch.setitem(eps_protocol.TASKS, "synthetic", tiny)
    command = ["--tasks", "synthetic", "--out", str(tmp_path), "--variants"]
    for variant in ("fedexp", "scaffold-exp"):
        assert eps_main([*command, variant]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2 * 4
    assert eps_main([*command, "scaffold-exp"]) == 0
    assert capsys.readouterr().out == ""
    assert len({path.read_bytes() for path in tmp_path.glob("*.csv")}) == 2
    assert eps_main(["--tasks", "digit"]) == 1
    assert "did you mean digits" in capsys.readouterr().err
