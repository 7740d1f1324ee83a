"""Pages of algorithms: each has its page, sections, options and current blocks and figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.algorithm_pages import report
from tools.algorithm_pages.chooser import CHOICES
from tools.algorithm_pages.figure import POINTS, curve, figure
from tools.algorithm_pages.report import (
    DELTA,
    DELTA_OPTIONS,
    FOLDER,
    PAGES,
    SECTIONS,
    meaning,
    overview_blocks,
    own_rows,
    page_blocks,
    page_path,
    read_pages,
    shown_rows,
    summary,
    title,
)
from tools.leaderboard.measures import Board, Cell, load_board
from tools.leaderboard.protocol import ENTRIES, TASKS
from tools.leaderboard.runs import BoardRun
from tools.results.archive import load_archive
from tools.results.documents import ARCHIVE, LEADERBOARD, fill

from fedexp.algorithms import ALGORITHMS, Algorithm, fedavg
from fedexp.engine.contract import probe
from fedexp.engine.state import SimulationState
from fedexp.errors import UsageError
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.server import Adam, ExP
from fedexp.tasks import digits

ROOT = Path(__file__).parents[2]
LIMIT = 25_000  # bytes of a figure
OVERVIEW = Path("docs/algorithms.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return read_pages(ROOT)


@pytest.fixture(scope="module")
def board() -> Board:
    return load_board(ROOT / LEADERBOARD, load_archive(ROOT / ARCHIVE).runs)


@pytest.fixture(scope="module")
def full_board() -> Board:
    """Made-up runs of every row on every task that it is for."""
    cells = {}
    for entry in ENTRIES.values():
        for name, task in TASKS.items():
            if name in entry.centres:
                count = task.rounds // task.evaluate_every
                values = tuple(0.98 * k / count for k in range(1, count + 1))
                runs = [BoardRun(entry.name, s, entry.points(name)[0], values) for s in range(3)]
                cells[name, entry.name] = Cell(name, entry, tuple(runs))
    return cells


def test_there_is_one_page_per_algorithm_and_one_of_the_local_optimiser() -> None:
    found = {path.stem for path in (ROOT / FOLDER).glob("*.md")}
    assert found == {*ALGORITHMS, DELTA}


def test_a_missing_page_is_named_with_its_sections(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fedavg\.md is missing; write it with the sections Form"):
        read_pages(tmp_path)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_summary_and_all_sections_in_order(name: str, pages: dict[str, str]) -> None:
    text = pages[name]
    assert re.match(r"# \w", text)
    assert summary(text).endswith(".")
    assert summary(text).count(". ") == 0  # one sentence
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS
    bodies = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert all(len(body.split()) > 8 for body in bodies)
    formula, _, use, *_ = bodies
    assert formula.count("$$") >= 2
    assert "\\Delta_i = w^t - w_i" in formula
    assert "import fedexp as fx\n" in use
    assert f"--algorithm {'fedavg' if name == DELTA else name} " in use


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_option_with_its_default(name: str, pages: dict[str, str]) -> None:
    listed = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| \S", pages[name], re.MULTILINE))
    if name == DELTA:
        assert {key.removeprefix("local.") for key in listed} == set(DELTA_OPTIONS)
        return
    options = Setup(ALGORITHMS[name](), LocalTraining()).options()
    assert list(listed) == [key for key in options if not key.startswith("local.")]
    assert {key: str(options[key]) for key in listed} == listed


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_and_the_figure_of_a_page_are_current(
    name: str, pages: dict[str, str], board: Board
) -> None:
    blocks = page_blocks(name, board)
    assert set(re.findall(r"<!-- begin ([\w-]+) -->", pages[name])) == set(blocks)
    assert fill(pages[name], blocks) == pages[name]
    drawn, path = figure(name, board), (ROOT / page_path(name)).with_suffix(".svg")
    assert drawn == (path.read_text(encoding="utf-8") if path.is_file() else None)


def test_the_overview_is_current_and_links_to_every_page(
    pages: dict[str, str], board: Board
) -> None:
    text = (ROOT / OVERVIEW).read_text(encoding="utf-8")
    blocks = overview_blocks(pages, board)
    assert set(re.findall(r"<!-- begin ([\w-]+) -->", text)) == set(blocks)
    assert fill(text, blocks) == text
    assert {f"algorithms/{name}.md" for name in PAGES} <= set(LINK.findall(text))


def test_a_changed_default_and_a_changed_summary_make_blocks_stale(
    pages: dict[str, str], board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> Algorithm:
        return fedavg(lr=0.5)

    monkeypatch.setitem(ALGORITHMS, "fedavg", other)
    assert fill(pages["fedavg"], page_blocks("fedavg", board)) != pages["fedavg"]
    changed = {**pages, "fedavg": pages["fedavg"].replace("The server", "A server", 1)}
    assert overview_blocks(changed, board) != overview_blocks(pages, board)


def test_new_rows_enter_pages_and_overview(pages: dict[str, str], full_board: Board) -> None:
    text = page_blocks("fedams", full_board)["results"]
    assert "Not run yet" not in text
    for task in ("digits", "emnist", "shakespeare"):
        assert f"### {TASKS[task].title}\n" in text
    assert page_blocks("fedams", {})["results"] == "No runs yet."
    head = overview_blocks(pages, full_board)["algorithm-pages"].splitlines()[0]
    assert all(task.title.partition(",")[0].partition(" (")[0] in head for task in TASKS.values())


def test_a_page_compares_with_fedavg_and_with_printed_fedexp_where_there_is_no_other(
    full_board: Board,
) -> None:
    assert shown_rows("scaffold", "cifar10", full_board) == ["scaffold", "fedavg", "fedexp"]
    without = {key: cell for key, cell in full_board.items() if key != ("cifar10", "fedexp")}
    rows = ["scaffold", "fedavg", "fedexp-printed"]
    assert shown_rows("scaffold", "cifar10", without) == rows
    assert shown_rows("fedexp", "digits", full_board) == ["fedexp", "fedexp-printed", "fedavg"]
    assert [entry.name for entry in own_rows("fedavg")] == ["fedavg"]  # not Delta-SGD's


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_small_svgs_with_a_panel_per_task(name: str, full_board: Board) -> None:
    text = figure(name, full_board)
    assert text is not None
    assert len(text.encode()) < LIMIT
    root = ElementTree.fromstring(text)
    tasks = [task for task in TASKS if (task, own_rows(name)[0].name) in full_board]
    inner = root.findall(".//{http://www.w3.org/2000/svg}svg")
    assert len(inner) == len(tasks)
    titles = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert titles >= {TASKS[task].title for task in tasks}
    assert figure(name, {}) is None


def test_four_panels_are_two_by_two(full_board: Board) -> None:
    def places(tasks: int) -> set[str]:
        kept = list(TASKS)[:tasks]
        text = figure("fedavg", {key: c for key, c in full_board.items() if key[0] in kept}) or ""
        return set(re.findall(r'transform="translate\((\d+) ', text))

    assert [len(places(tasks)) for tasks in range(1, 6)] == [1, 2, 3, 2, 3]


def test_a_choice_has_evidence_of_two_tasks(pages: dict[str, str], full_board: Board) -> None:
    lines = overview_blocks(pages, full_board)["chooser"].splitlines()
    backed = [line for line in lines if "digits: " in line]
    assert len(backed) == sum(bool(choice.rows) for choice in CHOICES)
    assert all(line.count("<br>EMNIST: ") == line.count("<br>") == 1 for line in backed)


def test_a_curve_is_smoothed_thinned_and_ends_where_a_seed_diverged(full_board: Board) -> None:
    cell = full_board["digits", "fedavg"]
    rounds, values = zip(*curve(cell, 1), strict=True)
    assert len(rounds) == POINTS
    assert (rounds[0], rounds[-1]) == (1, 150)
    assert values[0] == pytest.approx(0.98 / 150)
    assert values[-1] == pytest.approx(0.98 * 148 / 150)  # the mean of rounds 146 to 150
    first, *others = cell.runs
    short = replace(cell, runs=(replace(first, values=first.values[:40]), *others))
    assert curve(short, 1)[-1][0] == 40


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_bytes_of_the_table_are_those_of_records(name: str) -> None:
    task, algorithm = digits(), ALGORITHMS[name]()
    state = SimulationState.initial(task, algorithm, 0)
    d, counted = state.params.numel(), []
    for line in report.state(name).splitlines()[2:4]:
        terms = line.split("|")[2].split("+")
        parts = [term.strip().partition("d") for term in terms]
        counted.append(sum(int(n or 1) * (d if unit else 1) for n, unit, _ in parts))
    _, up, down = probe(algorithm, state)
    assert counted[1] * 4 == down
    assert counted[0] * 4 <= up <= counted[0] * 4 + 4 * 2  # single numbers may have 8 bytes


def test_meanings_are_first_sentences_with_links() -> None:
    assert meaning(Adam, "tau") == "the degree of adaptivity τ >= 0"
    assert '"authors" divides' in meaning(Adam, "form")  # "et al." ends no sentence
    assert "[paper.md](../paper.md#released-epsilon)" in meaning(ExP, "eps_mode")
    assert "|" not in meaning(ExP, "eps")
    with pytest.raises(UsageError, match="ExP does not document speed"):
        meaning(ExP, "speed")


def test_the_chooser_names_pages_and_rows_that_exist() -> None:
    for choice in CHOICES:
        assert set(choice.take) <= set(PAGES)
        assert set(choice.rows) <= set(ENTRIES)
        assert choice.rows or "](" in choice.reason  # backed by a row or a statement elsewhere


def test_links_of_pages_and_overview_lead_somewhere(pages: dict[str, str]) -> None:
    texts = {ROOT / page_path(name): text for name, text in pages.items()}
    texts[ROOT / OVERVIEW] = (ROOT / OVERVIEW).read_text(encoding="utf-8")
    for path, text in texts.items():
        for link in LINK.findall(text):
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.is_file(), f"{path.name}: {link}"
            if anchor:
                assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path.name}: {link}"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: explicit ones, and those of its headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles}
    return named | set(re.findall(r'<a\s+id="([\w-]+)"', text))


def test_titles_are_those_of_the_leaderboard(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        rows = own_rows(name)
        assert title(text) in rows[0].title


def test_an_algorithm_without_a_row_of_the_leaderboard_has_its_page_all_the_same(
    pages: dict[str, str], full_board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = {name: entry for name, entry in ENTRIES.items() if name != "fedams"}
    monkeypatch.setattr(report, "ENTRIES", fewer)
    assert page_blocks("fedams", full_board)["results"] == "No runs yet."
    assert "[FedAMS](algorithms/fedams.md)" in overview_blocks(pages, full_board)["algorithm-pages"]
    assert figure("fedams", full_board) is None
