"""Generated documents, tables and figures agree with the archive of runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.results.archive import load_archive
from tools.results.documents import (
    ABOUT,
    APPENDIX,
    ARCHIVE,
    DIFFERS,
    DOCUMENT,
    DOCUMENTS,
    EMNIST_TUNED,
    EPS_DOCUMENT,
    HALF,
    PAGES,
    README,
    fill,
    generate,
    loose_numbers,
    stale,
    write,
)
from tools.results.search import load_search, tuned_runs
from tools.results.shakespeare import long_runs

from fedexp.errors import UsageError

ROOT = Path(__file__).parents[2]
LIMIT = 8_000_000  # bytes of the whole archive, about 40 kB per run of 500 rounds
Made = Mapping[Path, str]


@pytest.fixture(scope="module")
def made() -> Made:
    return generate(ROOT)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """A copy of the generated files and the archive, to be changed."""
    shutil.copytree(ROOT / ARCHIVE, tmp_path / ARCHIVE)
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not stale(tmp_path, made)
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with the runs of the synthetic regression alone."""
    shutil.copytree(ROOT / ARCHIVE / "runs", tmp_path / ARCHIVE / "runs", ignore=_others)
    for name in (*DOCUMENTS, *PAGES.values()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write(tmp_path, generate(tmp_path))
    return tmp_path


def _others(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("synthetic-")]


def test_every_run_is_used_and_seeds_count_from_zero() -> None:
    archive = load_archive(ROOT / ARCHIVE)
    used: set[str] = set()
    for stored in (*archive.studies.values(), *archive.released.values()):
        for runs in (runs for series in stored.groups.values() for runs in series.values()):
            assert [run.seed for run in runs] == list(range(len(runs)))
            used |= {run.folder.name for run in runs if run.folder}
    trials = load_search(ROOT / EMNIST_TUNED)
    used |= {run.folder.name for _, runs in tuned_runs(archive, trials) for run in runs}
    used |= {run.folder.name for _, run in long_runs(archive)}
    assert used == {run.folder.name for run in archive.runs}


def spoil(path: Path, pattern: str) -> None:
    """Change the digit at the end of what the pattern matches."""
    text = path.read_text()
    found = re.search(pattern, text, re.DOTALL)
    assert found
    at = found.end() - 1
    path.write_text(f"{text[:at]}{9 - int(text[at])}{text[at + 1 :]}")


def test_all_generated_files_are_up_to_date(made: Made) -> None:
    problems = stale(ROOT, made)
    assert not problems, "; ".join(problems)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (DOCUMENT, r"begin table1.*?\| FedExP [^|]*\| \d"),
        (APPENDIX, r"begin study-synthetic.*?\| FedExP \| \d"),
        (APPENDIX, r"begin runs.*?finished.*?\d"),
        (README, r"begin readme.*?EMNIST.*?\| \d"),
        (EPS_DOCUMENT, r"begin eps-cells.*?digits \| \d"),
        (Path("docs/leaderboard.md"), r"begin board-tables.*?FedAdam \| \d"),
        (Path("docs/algorithms.md"), r"begin chooser.*?FedAvg \d"),
        (PAGES["fedadam"], r"begin options.*?lr` \| `\d"),
        (PAGES["fedadam"].with_suffix(".svg"), r'polyline points="\d'),
        (ARCHIVE / "synthetic" / "table.md", r"fedexp \| \d"),
        (ARCHIVE / "synthetic" / "table.csv", r"fedexp,\d"),
        (ARCHIVE / "synthetic" / "summary.json", r'"mean": \d'),
        (ARCHIVE / "synthetic" / "figure.svg", r'd="M \d'),
    ],
)
def test_a_number_changed_by_hand_is_found(
    name: Path, pattern: str, copy: Path, made: Made
) -> None:
    spoil(copy / name, pattern)
    assert stale(copy, made) == [f"{name}: {DIFFERS}"]


def test_the_blocks_of_a_changed_document_are_regenerated(small: Path) -> None:
    before = {name: (small / name).read_text() for name in (APPENDIX, README)}
    spoil(small / APPENDIX, r"begin runs.*?finished.*?\d")
    mark = "begin readme -->\n"
    (small / README).write_text(before[README].replace(mark, f"{mark}7 times faster. "))
    made = generate(small)
    assert {line.split(":")[0] for line in stale(small, made)} == {str(APPENDIX), str(README)}
    write(small, made)
    assert {name: (small / name).read_text() for name in before} == before


@pytest.mark.parametrize("document", [DOCUMENT, APPENDIX, ABOUT], ids=str)
def test_hand_written_text_has_no_numbers(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert not loose_numbers(text)
    line = "It reached the target after 312 rounds."
    assert loose_numbers(f"{text}\n{line}\n") == [line]


def test_without_a_run_the_documents_are_out_of_date(small: Path) -> None:
    for path in (small / ARCHIVE / "runs").glob("synthetic-fedexp-*"):
        path.unlink()
    made = generate(small)
    lines = stale(small, made)
    assert f"{APPENDIX}: {DIFFERS}" in lines
    assert f"{ARCHIVE / 'synthetic' / 'table.md'}: no run of the archive leads to it" in lines
    assert "begin study-synthetic -->\nNo runs yet." in made[APPENDIX]


def test_links_between_the_pages_have_their_headings() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    cited = {
        link
        for page in pages
        for link in re.findall(r"(reproduction[\w-]*\.md)#([\w-]+)", page.read_text())
    }
    assert cited
    for name, anchor in cited:
        text = (ROOT / "docs" / name).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
        }


@pytest.mark.parametrize(("lost", "left"), [("csv", "toml"), ("toml", "csv")])
def test_half_of_a_run_is_named(lost: str, left: str, small: Path) -> None:
    gone = next((small / ARCHIVE / "runs").glob(f"synthetic-fedexp-*.{lost}"))
    gone.unlink()
    name = gone.with_suffix(f".{left}").relative_to(small)
    assert f"{name}: {HALF}" in stale(small, generate(small))


def test_a_changed_run_is_refused(small: Path) -> None:
    spoil(next((small / ARCHIVE / "runs").glob("synthetic-fedexp-*.csv")), r"\n1,\d")
    with pytest.raises(UsageError, match="changed since it was archived"):
        generate(small)


def test_the_archive_is_small_and_names_no_folder_of_a_machine() -> None:
    files = [path for path in (ROOT / ARCHIVE).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT
    described = [path.read_text() for path in files if path.suffix == ".toml"]
    assert described
    assert not [text for text in described if re.search(r"(/tmp|/home|/work|/root)\b", text)]


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


def test_a_figure_of_a_page_without_runs_is_named(small: Path) -> None:
    left = PAGES["fedams"].with_suffix(".svg")
    (small / left).write_text("<svg/>")
    assert f"{left}: no run of the archive leads to it" in stale(small, generate(small))
