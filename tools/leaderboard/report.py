"""The tables and the figure of the leaderboard, as blocks of docs/leaderboard.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedexp.analysis.plots import colour, entitle, label, new_figure
from tools.leaderboard.measures import Board, Cell
from tools.leaderboard.protocol import ENTRIES, SEEDS, TASKS, BoardTask
from tools.results.format import NO_RUNS, paragraphs, percent, table, table_of_filled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = "figure.svg"
COLUMNS = 2  # panels side by side: more would make the labels too small for a page


def blocks(board: Board) -> dict[str, str]:
    """Return the generated blocks by name."""
    return {
        "board-summary": summary(board),
        "board-tables": tables(board),
        "board-tuning": tuning(board),
        "board-machines": machines(board),
    }


def summary(board: Board) -> str:
    """Return the rounds to the upper target of every row on every task."""
    if not board:
        return NO_RUNS
    tasks = filled(board)
    titles = (f"{TASKS[task].title}: {percent(TASKS[task].targets[1])}" for task in tasks)
    rows = []
    for name, entry in ENTRIES.items():
        cells = [board.get((task, name)) for task in tasks]
        rows.append([entry.title, *("" if cell is None else _summarised(cell) for cell in cells)])
    return paragraphs(table(["algorithm", *titles], rows), _without_runs(board))


def filled(board: Board) -> list[str]:
    """Return the names of the tasks that have runs."""
    return [name for name in TASKS if any(task == name for task, _ in board)]


def _without_runs(board: Board) -> str:
    """Return the line that names the tasks of the protocol without runs."""
    empty = [task.title for name, task in TASKS.items() if name not in filled(board)]
    return f"No runs yet: {', '.join(empty)}." if empty else ""


def _summarised(cell: Cell) -> str:
    """Return the rounds to the upper target, with the number of seeds where some are missing."""
    seeds = len(cell.runs)
    if seeds == len(SEEDS) or cell.rounds(1) is None:
        return rounds_text(cell, 1)
    return f"{rounds_text(cell, 1)}, {seeds} seed{'s' if seeds > 1 else ''}"


def tables(board: Board) -> str:
    """Return one table per task, the fewest rounds to the upper target first."""
    if not board:
        return NO_RUNS
    parts = []
    for name in filled(board):
        cells = {row: cell for (task, row), cell in board.items() if task == name}
        parts += [f"### {TASKS[name].title}", _table(TASKS[name], cells)]
    return paragraphs(*parts, _without_runs(board))


def _table(task: BoardTask, cells: dict[str, Cell]) -> str:
    """Return the table of a task, without the measures that no row has."""
    headers = ["algorithm", *(f"rounds to {percent(target)}" for target in task.targets)]
    headers += ["final", "worst decile", "sent up", "sent down"]
    headers += [f"sent to {percent(task.targets[0])}", "seconds", "seeds"]
    rows = [_row(cell) for cell in sorted(cells.values(), key=_place)]
    missing = [e for e in ENTRIES.values() if task.name in e.centres and e.name not in cells]
    rows += [[entry.title, *[""] * (len(headers) - 1)] for entry in missing]
    return table_of_filled(headers, rows)


def _place(cell: Cell) -> tuple[float, float]:
    """Return the place of a row: rounds to the upper target; then the final accuracy."""
    rounds = cell.rounds(1)
    return (float("inf") if rounds is None else rounds), -(cell.final or 0.0)


def _row(cell: Cell) -> list[str]:
    up, down = map(_bytes, cell.sent) if cell.sent else ("", "")
    return [
        cell.entry.title,
        rounds_text(cell, 0),
        rounds_text(cell, 1),
        final_text(cell),
        "" if cell.worst is None else f"{100 * cell.worst:.1f} %",
        up,
        down,
        "" if cell.bytes_to_target is None else _bytes(cell.bytes_to_target),
        "" if cell.seconds is None else f"{cell.seconds:.0f}",
        str(len(cell.runs)),
    ]


def _bytes(number: float) -> str:
    """Return bytes with three digits, in MB and from 1,000 MB in GB.

    >>> _bytes(192_400), _bytes(420e6), _bytes(7.4e9)
    ('0.192 MB', '420 MB', '7.40 GB')
    """
    value, unit = (number / 1e9, "GB") if number >= 999.5e6 else (number / 1e6, "MB")
    return f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def rounds_text(cell: Cell, target: int) -> str:
    """Return the smoothed crossing and the first one, or how many seeds reach the target."""
    smooth, first = cell.rounds(target), cell.rounds(target, "first")
    if smooth is not None and first is not None:
        return f"{smooth:.0f} ({first:.0f})"
    counts = (len(cell.crossings(target)), len(cell.crossings(target, "first")))
    seeds = len(cell.runs)
    return f"{counts[0]} of {seeds} ({counts[1]} of {seeds})"


def final_text(cell: Cell) -> str:
    if cell.final is None:
        return f"{cell.diverged} of {len(cell.runs)} diverged"
    spread = "" if cell.spread is None else f" ± {100 * cell.spread:.2f}"
    return f"{100 * cell.final:.2f}{spread} %"


def tuning(board: Board) -> str:
    """Return the best point of each row on the tuned tasks, with its score."""
    names = [name for name in filled(board) if TASKS[name].tuned]
    if not names:
        return NO_RUNS
    headers = ["algorithm", "option", *(TASKS[name].title for name in names)]
    rows = []
    for entry in ENTRIES.values():
        cells = [board.get((name, entry.name)) for name in names]
        tuned = ["" if cell is None else _tuned(cell) for cell in cells]
        rows.append([entry.title, f"`{entry.option}`" if entry.option else "", *tuned])
    return table(headers, rows, left=2)


def _tuned(cell: Cell) -> str:
    """Return the client step size, the value of the option and the score; * marks an edge."""
    edges = cell.edges()
    values = [f"{v:.3g}{'*' if name in edges else ''}" for name, v in cell.point.items()]
    return f"{', '.join(values)}: {100 * (cell.score or 0):.1f} %"


def machines(board: Board) -> str:
    """Return how many judged runs were executed where."""
    counts = Counter((TASKS[c.task].title, r.machine) for c in board.values() for r in c.runs)
    where = {"archive": "from [the paper's results on real data](reproduction.md)"}
    lines = [f"- {task}: {n} runs, {where.get(name, name)}" for (task, name), n in counts.items()]
    return "\n".join(lines) or NO_RUNS


def figure(board: Board) -> Figure | None:
    """Draw the rounds to both targets, one panel per task that has runs; None without runs."""
    names = filled(board)
    if not names:
        return None
    columns = min(len(names), COLUMNS)
    lines = [names[at : at + columns] for at in range(0, len(names), columns)]
    rows = [[row for row in ENTRIES if any((n, row) in board for n in line)] for line in lines]
    heights = [1.0 + 0.24 * len(shown) for shown in rows]
    drawing, panels = new_figure(columns, 4.0, sum(heights) / len(lines), len(lines))
    panels[0].get_gridspec().set_height_ratios(heights)  # type: ignore[union-attr]
    for at, axes in enumerate(panels):
        if at >= len(names):
            axes.set_visible(False)
            continue
        name, shown = names[at], rows[at // columns]
        _draw(axes, name, shown, {row: board[name, row] for row in shown if (name, row) in board})
        titles = [ENTRIES[row].title for row in shown] if at % columns == 0 else [""] * len(shown)
        axes.set_yticks(range(len(shown)), titles, fontsize=11)
        axes.tick_params(axis="x", labelsize=11)
        axes.xaxis.label.set_fontsize(11)
        axes.title.set_fontsize(12)
    entitle(drawing, f"Rounds to two test accuracies, mean over up to {len(SEEDS)} seeds")
    return drawing


def _draw(axes: Axes, name: str, rows: Sequence[str], cells: dict[str, Cell]) -> None:
    """Draw a row as a line between its two targets; a cross marks one that some seed misses."""
    task = TASKS[name]
    for at, row in enumerate(rows):
        if row not in cells:
            continue
        shade = colour(ENTRIES[row].algorithm)
        ends = [cells[row].rounds(target) for target in (0, 1)]
        known = [task.rounds if end is None else end for end in ends]
        axes.plot(known, [at, at], color=shade, linewidth=1.2)
        for x, end, face in zip(known, ends, (shade, "white"), strict=True):
            mark = "x" if end is None else "o"
            axes.plot([x], [at], mark, color=shade, markerfacecolor=face, markersize=5.5)
    axes.set_xlim(0, 1.04 * task.rounds)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    low, high = (percent(target) for target in task.targets)
    label(axes, f"● {low}, ○ {high}; x: missed", "", task.title)
