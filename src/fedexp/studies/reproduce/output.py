"""What a study leaves behind: table.md, table.csv, a figure in three formats, summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp import __version__
from fedexp.errors import UsageError
from fedexp.experiments.canvas import check_writable, save
from fedexp.experiments.tables import render_table
from fedexp.studies.reproduce.study import Findings, Plan

FIGURES = ("figure.png", "figure.svg", "figure.pdf")
NOT_COMPARABLE = "the published figures are not comparable line by line with what follows"
CAUTION = " (shrunk, they prove little)"
PARTIAL = "cannot be compared with the paper's figures line by line"
FEWER_SEEDS = "the means are less certain than the paper's"


def head_lines(plan: Plan) -> list[str]:
    """What to know before reading a number; that the study was shrunk comes first."""
    lines = []
    if plan.shrunk:
        caution = FEWER_SEEDS if plan.comparable else NOT_COMPARABLE
        if plan.comparable and plan.partial:
            caution = f"{' and '.join(plan.partial)} {PARTIAL}"
        lines.append(f"{plan.word.upper()}, so {caution}:")
        lines += [f"  {line}" for line in plan.shrunk]
    lines += [plan.study.title, _how(plan)]
    return [*lines, *(f"note: {line}" for line in (*plan.left_out, *plan.study.remarks))]


def _how(plan: Plan) -> str:
    """Mode, rounds and arithmetic; a study without runs, such as toy, has no modes."""
    rounds = "1 round" if plan.rounds == 1 else f"{plan.rounds:,} rounds"
    if not plan.jobs:
        return rounds
    every = max(job.spec.evaluate_every or 1 for job in plan.jobs)
    how = f"mode {plan.request.mode}, {rounds}, evaluated every {every}"
    return f"{how}, arithmetic in {plan.arithmetic}"


def source_lines(findings: Findings) -> list[str]:
    """Where the paper's figures stand, and what to know of them."""
    sources = [column.source() for column in findings.table.columns]
    return [
        f"paper: {each.place}, {each.meaning}{f' ({each.note})' if each.note else ''}"
        for each in sources
        if each
    ]


def render(plan: Plan, findings: Findings, how: str) -> str:
    """The study as text, Markdown, CSV or LaTeX; CSV holds plain numbers, for programs."""
    if how == "csv":
        return render_table(how, *findings.table.numbers(plan.comparable, plan.partial)) + "\n"
    headers = findings.table.headers()
    cells = findings.table.cells(plan.comparable, plan.partial)
    if how == "text":
        headers, cells = _second_to_the_left(headers, cells)
    grid = render_table(how, headers, cells)
    return "\n".join(_around(grid, plan, findings, how)) + "\n"


def _around(grid: str, plan: Plan, findings: Findings, how: str) -> list[str]:
    """The table between what to know before it and what the paper says of it."""
    head = [*head_lines(plan), *source_lines(findings)]
    said = f"What the paper says, held against these runs{CAUTION if plan.shrunk else ''}:"
    checks = [check.line() for check in findings.checks]
    if how == "latex":
        return [*(f"% {line.strip()}" for line in (*head, said, *checks)), grid]
    if how == "markdown":
        quoted = [f"> {line.strip()}  " for line in head]
        return [*quoted, "", grid, "", said, "", *(f"- {line}" for line in checks)]
    return [*head, "", grid, "", said, *(f"  {line}" for line in checks)]


def _second_to_the_left(
    headers: Sequence[str], cells: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The second column holds names as the first does: fill it up, so that it stays left."""
    width = max(len(row[1]) for row in (headers, *cells))
    head, *rows = [[row[0], row[1].ljust(width), *row[2:]] for row in (headers, *cells)]
    return head, rows


def write_all(folder: Path, plan: Plan, findings: Findings) -> list[Path]:
    """Write everything; the figure's title says when the study was shrunk."""
    written = [folder / "table.md", folder / "table.csv", folder / "summary.json"]
    texts = [
        render(plan, findings, "markdown"),
        render(plan, findings, "csv"),
        json.dumps(summary(plan, findings), indent=2, allow_nan=False) + "\n",
    ]
    try:
        for path, text in zip(written, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    figure = findings.draw()
    for name in FIGURES:
        save(figure, folder / name)
    return [*written, *(folder / name for name in FIGURES)]


def check_folder(folder: Path) -> None:
    """Find out before hours of work that the results cannot be written."""
    for name in FIGURES:
        check_writable(folder / name)


def summary(plan: Plan, findings: Findings) -> dict[str, Any]:
    """The study as plain values."""
    columns = {column.name: column.source() for column in findings.table.columns}
    sources = {
        name: {"place": source.place, "meaning": source.meaning, "approximate": source.approximate}
        for name, source in columns.items()
        if source
    }
    return {
        "study": plan.study.name,
        "title": plan.study.title,
        "fedexp": __version__,
        "mode": plan.request.mode if plan.jobs else None,
        "device": plan.devices,
        "precision": plan.arithmetic,
        "rounds": plan.rounds,
        "tasks": list(plan.tasks),
        "shrunk": list(plan.shrunk),
        "comparable": plan.comparable and not plan.partial,
        "left_out": list(plan.left_out),
        "remarks": list(plan.study.remarks),
        "published": sources,
        "lines": findings.table.to_json(plan.comparable, plan.partial),
        "checks": [
            {
                "task": each.task,
                "claim": each.claim.text,
                "place": each.claim.place,
                "holds": each.holds,
                "seen": each.seen,
            }
            for each in findings.checks
        ],
    }


def figure_title(plan: Plan) -> str:
    """The study's title, marked where it was shrunk."""
    return f"{plan.study.title} ({plan.word})" if plan.shrunk else plan.study.title
