"""The curves of a page as a small SVG: test accuracy by round, one panel per task.

Written directly: the same figure by matplotlib has five times the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

from fedexp.analysis.plots import colour
from tools.algorithm_pages.report import (
    DELTA,
    PRINTED,
    REFERENCES,
    filled_tasks,
    own_rows,
    shown_rows,
)
from tools.leaderboard.measures import Board, Cell
from tools.leaderboard.protocol import ENTRIES, LAST, TASKS, BoardTask

POINTS = 60  # of a curve
COLUMNS = 3
PANEL = (270, 200)  # with its labels, in pixels
PLOT = (215, 135)
LEFT, TOP, LEGEND = 42, 26, 24
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)  # between marks of the accuracy
TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'


class Look(NamedTuple):
    """How the curves of a row are drawn."""

    colour: str
    width: float
    dash: str


def figure(name: str, board: Board) -> str | None:
    """Return the SVG of a page; None without runs."""
    tasks = filled_tasks(name, board)
    if not tasks:
        return None
    looks = _looks(name)
    shown = {row for task in tasks for row in shown_rows(name, task, board)}
    columns = 2 if len(tasks) in (1, 2, 4) else COLUMNS  # four: two by two
    width = PANEL[0] * columns
    height = LEGEND + PANEL[1] * -(-len(tasks) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" {TEXT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend({row: look for row, look in looks.items() if row in shown}),
    ]
    for at, task in enumerate(tasks):
        x, y = PANEL[0] * (at % columns), LEGEND + PANEL[1] * (at // columns)
        cells = [board[task, row] for row in shown_rows(name, task, board)]
        parts += [f'<g transform="translate({x + LEFT} {y + TOP})">']
        parts += [*_panel(TASKS[task], cells, looks), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _looks(name: str) -> dict[str, Look]:
    """Return the looks of the page's own rows and of those to compare with, which are thinner."""
    own = [entry.name for entry in own_rows(name)]
    looks = {}
    for row in dict.fromkeys([*own, *REFERENCES]):
        shade = colour(DELTA if row == DELTA else ENTRIES[row].algorithm)
        looks[row] = Look(shade, 2.2 if row in own else 1.1, "5 3" if row == PRINTED else "")
    return looks


def _legend(looks: dict[str, Look]) -> list[str]:
    parts, x = [], 10
    for row, look in looks.items():
        title = ENTRIES[row].title
        parts.append(_line([(x, 14.0), (x + 22, 14.0)], look))
        parts.append(f'<text x="{x + 27}" y="18">{escape(title)}</text>')
        x += 45 + 6 * len(title)
    return parts


def _panel(task: BoardTask, cells: Sequence[Cell], looks: dict[str, Look]) -> list[str]:
    """Return the panel of a task, drawn from the upper left corner of its plot."""
    curves = {cell.entry.name: curve(cell, task.evaluate_every) for cell in cells}
    wide, high = PLOT
    top = max(value for points in curves.values() for _, value in points)
    top = max(top, task.targets[1])
    low = max(0.0, task.targets[0] - 2 * (top - task.targets[0]))
    top += 0.04 * (top - low)

    def at(rounds: float, value: float) -> tuple[float, float]:
        return wide * rounds / task.rounds, high * (top - value) / (top - low)

    parts = [f'<text x="0" y="-10" font-weight="bold">{escape(task.title)}</text>']
    step = next(each for each in STEPS if (top - low) / each <= 5)
    for k in range(int(low / step) + 1, int(top / step) + 1):
        y = at(0, k * step)[1]
        parts.append(f'<path d="M0 {y:.1f}H{wide}" stroke="#ddd" stroke-width=".6"/>')
        mark = f"{100 * k * step:.0f}"
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{mark}</text>')
    every = 50 if task.rounds <= 250 else 100
    for rounds in range(0, task.rounds + 1, every):
        x = at(rounds, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{high + 14}" text-anchor="middle">{rounds}</text>')
    parts.append(f'<text x="{wide / 2}" y="{high + 28}" text-anchor="middle">round</text>')
    parts.append('<text x="-34" y="-10" font-size="10">%</text>')
    for target in task.targets:
        y = at(0, target)[1]
        parts.append(f'<path d="M0 {y:.1f}H{wide}" stroke="#555" stroke-dasharray="2 2"/>')
    parts.append(f'<path d="M0 0V{high}H{wide}" fill="none" stroke="#555"/>')
    parts.append(f'<svg width="{wide}" height="{high}">')  # clips the curves
    order = sorted(curves, key=lambda row: looks[row].width)  # the page's own on top
    lines = [_line([at(*point) for point in curves[row]], looks[row]) for row in order]
    return [*parts, *lines, "</svg>"]


def curve(cell: Cell, every: int) -> list[tuple[int, float]]:
    """Return (round, test accuracy), averaged over seeds and the last evaluations, thinned out.

    It ends where the first seed diverged.
    """
    means = [fmean(values) for values in zip(*(run.values for run in cell.runs), strict=False)]
    smooth = [fmean(means[max(0, k - LAST + 1) : k + 1]) for k in range(len(means))]
    count = min(POINTS, len(smooth))
    picked = [round(k * (len(smooth) - 1) / max(count - 1, 1)) for k in range(count)]
    return [(every * (k + 1), smooth[k]) for k in picked]


def _line(points: Sequence[tuple[float, float]], look: Look) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{look.colour}" '
        f'stroke-width="{look.width}"{dash}/>'
    )
