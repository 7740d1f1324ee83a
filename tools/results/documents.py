"""The generated files: tables and figures per study, and the blocks of documents.

`DOCUMENTS` and `PAGES` are written by hand around blocks `<!-- begin NAME -->` to
`<!-- end NAME -->`, which are generated. Numbers belong in blocks: `loose_numbers` finds stray
ones.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.errors import UsageError, unknown_name
from fedexp.reproduce.output import render, summary
from tools.algorithm_pages import report as algorithm_pages
from tools.algorithm_pages.figure import figure as algorithm_figure
from tools.eps_study import report as eps_report
from tools.leaderboard import report as leaderboard
from tools.leaderboard.measures import load_board
from tools.outer_study import report as outer_report
from tools.results import deviations, runs, search, shakespeare, studies, table1
from tools.results.archive import NAMES, Archive, StoredStudy, load_archive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARCHIVE, DOCUMENT, README = Path("results"), Path("docs/reproduction.md"), Path("README.md")
APPENDIX = Path("docs/reproduction-appendix.md")
EPS_STUDY, EPS_DOCUMENT = ARCHIVE / "eps-study", Path("docs/eps-study.md")
SHAKESPEARE, EMNIST_TUNED = ARCHIVE / "shakespeare", ARCHIVE / "emnist-tuned"
LEADERBOARD, UNTRUSTED = ARCHIVE / "leaderboard", ARCHIVE / "untrusted"
OUTER_STUDY = ARCHIVE / "outer-study"
DOCUMENTS = (
    DOCUMENT,
    APPENDIX,
    README,
    EPS_DOCUMENT,
    Path("docs/extrapolation.md"),
    Path("docs/tasks.md"),
    Path("docs/leaderboard.md"),
    Path("docs/algorithms.md"),
    Path("docs/outer-optimisers.md"),
)
PAGES = {name: algorithm_pages.page_path(name) for name in algorithm_pages.PAGES}
ABOUT = ARCHIVE / "README.md"  # written by hand: the files of the archive
DIFFERS = "differs from the archive; run `make results`, or restore what was changed"
HALF = "half of a run; restore its other file, or archive the run again"
BLOCKS: dict[str, Callable[[Archive], str]] = {
    "headline": table1.headline,
    "table1": table1.tables,
    "levels": table1.other_targets,
    "disagreements": studies.disagreements,
    "verdicts": studies.verdicts,
    "criteria": studies.criteria,
    "missing": deviations.missing,
    "fill": runs.missing_commands,
    "eps-readings": deviations.eps_readings,
    "eps-table4": deviations.extrapolated_rounds,
    "writers": deviations.writers,
    "seeds": deviations.seeds,
    "arithmetic": deviations.arithmetic,
    "rerun": runs.commands,
    "machines": runs.machines,
    "runs": runs.every_run,
    "readme": table1.readme,
    "shakespeare-runs": shakespeare.runs_table,
    **{f"study-{name}": partial(studies.section, name=name) for name in NAMES},
}


def generate(root: Path) -> dict[Path, str]:
    """Return every generated file, by its path relative to the repository.

    Args:
        root: the repository: its archive, and the documents with their hand-written text.
    """
    archive = load_archive(root / ARCHIVE)
    board, pages = load_board(root / LEADERBOARD, archive.runs), algorithm_pages.read_pages(root)
    made: dict[Path, str] = {}
    for name, stored in archive.studies.items():
        made |= {ARCHIVE / name / file: text for file, text in _study_files(stored).items()}
    figures = {
        ARCHIVE / table1.FIGURE: table1.headline_figure(archive),
        EPS_STUDY / eps_report.FIGURE: eps_report.figure(root / EPS_STUDY),
        SHAKESPEARE / shakespeare.FIGURE: shakespeare.figure(archive),
        LEADERBOARD / leaderboard.FIGURE: leaderboard.figure(board),
        OUTER_STUDY / outer_report.FIGURE: outer_report.figure(root / OUTER_STUDY),
    }
    made |= {path: _svg(figure) for path, figure in figures.items() if figure is not None}
    blocks = {name: make(archive) for name, make in BLOCKS.items()}
    blocks["shakespeare-search"] = search.search_table(root / SHAKESPEARE)
    blocks["emnist-search"] = search.search_table(root / EMNIST_TUNED)
    blocks["emnist-tuned"] = search.tuned_table(archive, root / EMNIST_TUNED)
    blocks |= eps_report.blocks(root / EPS_STUDY)
    blocks |= leaderboard.blocks(board)
    blocks |= outer_report.blocks(root / OUTER_STUDY)
    blocks |= algorithm_pages.overview_blocks(pages, board)
    for name, path in PAGES.items():
        made[path] = fill(pages[name], algorithm_pages.page_blocks(name, board))
        if (drawn := algorithm_figure(name, board)) is not None:
            made[path.with_suffix(".svg")] = drawn
    for document in DOCUMENTS:
        made[document] = fill((root / document).read_text(encoding="utf-8"), blocks)
    return made


def _study_files(stored: StoredStudy) -> dict[str, str]:
    """Return the tables and the figure of a study; nothing if it has no runs."""
    if stored.findings is None:
        return {}
    plan, findings = stored.plan, stored.findings
    # Without the version: the one that makes the table is not the one that made the runs.
    about = {name: value for name, value in summary(plan, findings).items() if name != "fedexp"}
    return {
        "table.md": render(plan, findings, "markdown"),
        "table.csv": render(plan, findings, "csv"),
        "summary.json": json.dumps(about, indent=2, allow_nan=False) + "\n",
        studies.FIGURE: _svg(findings.draw()),
    }


def _svg(figure: Figure) -> str:
    """Return the same SVG whenever it is drawn: no date, no random ids."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedexp"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def write(root: Path, made: Mapping[Path, str]) -> None:
    """Write the generated files."""
    for name, text in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def stale(root: Path, made: Mapping[Path, str]) -> list[str]:
    """Return one line for each file of the repository that is not as generated."""
    stored = {path.relative_to(root) for path in (root / ARCHIVE).rglob("*") if path.is_file()}
    lines = [f"{name}: {HALF}" for name in sorted(stored) if _is_half(name, stored)]
    folders = (EPS_STUDY, SHAKESPEARE, EMNIST_TUNED, LEADERBOARD, UNTRUSTED, OUTER_STUDY)
    data = {name for name in stored if name.parent in folders and name.suffix == ".csv"}
    own = {name for name in stored if name.parent != ARCHIVE / "runs" and name != ABOUT} - data
    drawn = (root / algorithm_pages.FOLDER).glob("*.svg")
    own |= {path.relative_to(root) for path in drawn}
    lines += [f"{name}: no run of the archive leads to it" for name in sorted(own - made.keys())]
    for name, text in made.items():
        if not (root / name).is_file():
            lines.append(f"{name}: is missing; run `make results`")
        elif not _same(name, (root / name).read_text(encoding="utf-8"), text):
            lines.append(f"{name}: {DIFFERS}")
    return lines


def _is_half(name: Path, stored: Set[Path]) -> bool:
    """Return whether a file of a run lacks the CSV or TOML file that belongs to it."""
    other = {".csv": ".toml", ".toml": ".csv"}.get(name.suffix)
    in_runs = name.parent == ARCHIVE / "runs"
    return in_runs and (other is None or name.with_suffix(other) not in stored)


_NUMBER = re.compile(r"-?\d+\.\d+")
_SVG_ID = re.compile(r"[0-9a-f]{10}")  # a hash of coordinates with all their digits
_TOLERANCE = 0.01  # points, 1/72 inch each


def _same(name: Path, one: str, other: str) -> bool:
    """Compare texts exactly, and SVGs up to the last digits of coordinates."""
    if name.suffix != ".svg":
        return one == other
    first, second = (_SVG_ID.sub("", text) for text in (one, other))
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
        return False
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    return all(abs(float(a) - float(b)) < _TOLERANCE for a, b in pairs)


_BLOCK = re.compile(r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:begin|end) [\w-]+ -->")
_LINK = re.compile(r"\]\(\S+\)")
# Digits that are not results: names, the paper's own numbering, `code`.
_NAMES = re.compile(
    r"`[^`\n]*`|CIFAR-10{1,2}\b|CINIC-10\b|ResNet-18\b|ICLR 2023\b|bf16\b|float32\b|tf32\b"
    r"|(?:Tables?|Figures?|[Ss]ections?|App\.) [A-Z]?[\d.]+(?:(?: to | and |, )\d+)*"
)


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Replace the blocks of a document.

    Raises `UsageError` for a mark without a block or without its other end.

    >>> fill("a <!-- begin x -->\\nold\\n<!-- end x --> b", {"x": "new"})
    'a <!-- begin x -->\\nnew\\n<!-- end x --> b'
    """
    for name in (match["name"] for match in _BLOCK.finditer(text)):
        if name not in blocks:
            raise unknown_name("block", name, blocks)
    if stray := _MARK.search(_BLOCK.sub("", text)):
        raise UsageError(f"{stray.group()} has no other end; restore its begin or its end")

    def filled(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- begin {name} -->\n{blocks[name]}\n<!-- end {name} -->"

    return _BLOCK.sub(filled, text)


def loose_numbers(text: str) -> list[str]:
    """Return the hand-written lines that have a number, outside of code and links.

    >>> loose_numbers("See Table 1 of CIFAR-10.\\nIt took 312 rounds.")
    ['It took 312 rounds.']
    """
    prose = re.sub(r"```.*?```", "", _BLOCK.sub("", text), flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith("    ")]
    return [line for line in lines if re.search(r"\d", _NAMES.sub("", _LINK.sub("", line)))]
