"""Everything that follows from an archive: tables and figures of studies, and two documents."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.reproduce.output import render, summary
from tools.results import again, headline, levels, runs_table, sections, side_by_side, why
from tools.results.gather import NAMES, Results, Studied, load_results
from tools.results.markers import fill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARCHIVE, DOCUMENT, README = Path("results"), Path("docs/reproduction.md"), Path("README.md")
ABOUT = ARCHIVE / "README.md"  # written by hand: what the files of the archive are
NUMBER = re.compile(r"-?\d+\.\d+")
LABEL = re.compile(r"[0-9a-f]{10}")  # made of all digits of what it names
DIFFERS = "differs from what the archive says; run `make results`, or put back what was changed"
HALF = "half of a run; put its other file back, or archive the run again"
PLACE = 0.01  # of a point, a 72nd of an inch: nothing that could be seen
BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": headline.headline,
    "table1": side_by_side.table1,
    "levels": levels.levels,
    "verdicts": sections.verdicts,
    "missing": sections.missing,
    "eps-modes": why.eps_modes,
    "writers": why.writers,
    "seeds": why.seeds,
    "arithmetic": why.arithmetic,
    "rerun": again.rerun,
    "machines": runs_table.machines,
    "runs": runs_table.runs,
    "readme": headline.readme,
    **{f"study-{name}": sections.of(name) for name in NAMES},
}


def generate(root: Path) -> dict[Path, str]:
    """Every file that follows from `root`/results, by its path in the project.

    Args:
        root: the project: its archive, and the documents whose prose is kept.
    """
    results = load_results(root / ARCHIVE)
    made: dict[Path, str] = {}
    for name, studied in results.studies.items():
        made |= {ARCHIVE / name / file: text for file, text in study_files(studied).items()}
    if (figure := headline.headline_figure(results)) is not None:
        made[ARCHIVE / headline.FIGURE] = drawing(figure)
    blocks = {name: make(results) for name, make in BLOCKS.items()}
    for document in (DOCUMENT, README):
        made[document] = fill((root / document).read_text(encoding="utf-8"), blocks)
    return made


def study_files(studied: Studied) -> dict[str, str]:
    """The tables and the figure of a study; nothing where it has no runs."""
    if studied.findings is None:
        return {}
    plan, findings = studied.plan, studied.findings
    # The version that makes the table is not the one that made the runs.
    about = {name: own for name, own in summary(plan, findings).items() if name != "fedexp"}
    return {
        "table.md": render(plan, findings, "markdown"),
        "table.csv": render(plan, findings, "csv"),
        "summary.json": json.dumps(about, indent=2, allow_nan=False) + "\n",
        sections.FIGURE: drawing(findings.draw()),
    }


def drawing(figure: Figure) -> str:
    """An SVG that is the same whenever it is drawn: no date, no random names."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedexp"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def write(root: Path, made: Mapping[Path, str]) -> None:
    """Put the files where they belong."""
    for name, text in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def stale(root: Path, made: Mapping[Path, str]) -> list[str]:
    """A line for each file of the project that is not what its archive says."""
    kept = {path.relative_to(root) for path in (root / ARCHIVE).rglob("*") if path.is_file()}
    lines = [f"{name}: {HALF}" for name in sorted(kept) if _is_half(name, kept)]
    own = {name for name in kept if name.parent != ARCHIVE / "runs" and name != ABOUT}
    lines += [f"{name}: no run of the archive leads to it" for name in sorted(own - made.keys())]
    for name, text in made.items():
        if not (root / name).is_file():
            lines.append(f"{name}: is not there")
        elif not _same(name, (root / name).read_text(encoding="utf-8"), text):
            lines.append(f"{name}: {DIFFERS}")
    return lines


def _is_half(name: Path, kept: Set[Path]) -> bool:
    """Whether a file of a run is there without the CSV or TOML that belongs to it."""
    other = {".csv": ".toml", ".toml": ".csv"}.get(name.suffix)
    in_runs = name.parent == ARCHIVE / "runs"
    return in_runs and (other is None or name.with_suffix(other) not in kept)


def _same(name: Path, one: str, other: str) -> bool:
    """Texts to the letter; of drawings all but the last digits of places."""
    if name.suffix != ".svg":
        return one == other
    first, second = (LABEL.sub("", text) for text in (one, other))
    if NUMBER.sub("#", first) != NUMBER.sub("#", second):
        return False
    pairs = zip(NUMBER.findall(first), NUMBER.findall(second), strict=True)
    return all(abs(float(a) - float(b)) < PLACE for a, b in pairs)
