"""Tables as text, Markdown, CSV and LaTeX, and the table of a comparison."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedexp.analysis.summary import LEAST_SEEDS, Line, is_accuracy, spread_of
from fedexp.errors import check_name
from fedexp.runs.spec import Outcome

Cells = Sequence[Sequence[str]]
LinesByTarget = Mapping[float | None, Sequence[Line]]


def comparison_table(
    by_target: LinesByTarget,
    metric: str,
    rounds: int,
    smooth: int = 1,
    higher: bool | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells: rounds to target, speed-up over FedAvg and final metric.

    A speed-up has its 95 % interval in brackets; over fewer than five seeds it has none, and the
    header has their number.

    The final metric has the round in which it was measured where lines differ in it, and a cell has
    the number of its seeds where some were left out. Speed-ups over different lines name them.

    Args:
        by_target: one line per algorithm, the same ones for each target; each but the first adds
            two columns.
        metric: field of the records.
        rounds: of a line whose seeds have all diverged.
        smooth: window of the final metric, in rounds.
        higher: marks the metric by an arrow if its name does not show which way is better.
    """
    headers, lines = ["algorithm"], next(iter(by_target.values()))
    for value, reaching in by_target.items():
        goal = "target" if value is None else format_value(value, metric)
        headers += [f"rounds to {goal}", _speedup_header(reaching)]
    over = f" (last {smooth} rounds)" if smooth > 1 else ""
    headers.append(f"final {metric.replace('_', ' ')}{_arrow(metric, higher)}{over}")
    several_ends = len({line.final_round for line in lines if line.final_round}) > 1
    several_references = len({line.reference for line in lines if line.speedup is not None}) > 1
    cells = []
    for at, line in enumerate(lines):
        row = [line.algorithm]
        for value, reaching in by_target.items():
            row.append("-" if value is None else _rounds_cell(reaching[at], rounds))
            row.append(_speedup_cell(reaching[at], several_references))
        cells.append([*row, _final_cell(line, metric, several_ends)])
    return headers, cells


def _arrow(metric: str, higher: bool | None) -> str:
    if higher is None or is_accuracy(metric) or metric.endswith("loss"):
        return ""
    return " ↑" if higher else " ↓"


def comparison_numbers(by_target: LinesByTarget) -> tuple[list[str], list[list[str]]]:
    """Return the same for programs: one plain number per column, empty if there is none.

    A further target adds the columns that depend on it, with its value at the end of their names.
    """
    lines, *further = by_target.values()
    rows = [
        {
            "algorithm": line.algorithm,
            "seeds": line.seeds,
            **_rounds_numbers(line),
            "final_mean": float(np.mean(line.finals)),
            "final_std": line.spread,
        }
        for line in lines
    ]
    for target, more in zip(list(by_target)[1:], further, strict=True):
        for row, line in zip(rows, more, strict=True):
            row.update({f"{name}_{target:g}": n for name, n in _rounds_numbers(line).items()})
    cells = [["" if n is None or n != n else str(n) for n in row.values()] for row in rows]
    return list(rows[0]) if rows else [], cells


def _rounds_numbers(line: Line) -> dict[str, float | None]:
    """Return the numbers of a line that depend on its target."""
    spread = spread_of(np.array(line.rounds)) if line.mean_rounds is not None else None
    low, high = line.interval or (None, None)
    return {
        "reached": len(line.rounds),
        "rounds_mean": line.mean_rounds,
        "rounds_std": spread,
        "speedup": line.speedup,
        "speedup_low": low,
        "speedup_high": high,
        "at_least": line.at_least,
    }


def render_table(format: str, headers: Sequence[str], cells: Cells) -> str:
    """Return the table in one of `FORMATS`."""
    check_name("format", format, FORMATS)
    return FORMATS[format](headers, cells)


def text_table(headers: Sequence[str], cells: Cells) -> str:
    """Return columns aligned with spaces: the first left, the others right.

    >>> print(text_table(["name", "n"], [["a", "10"], ["bcd", "5"]]))
    name  n
    ----  --
    a     10
    bcd    5
    """
    rows = [list(headers), *map(list, cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    rows.insert(1, ["-" * width for width in widths])
    justified = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in justified)


def markdown_table(headers: Sequence[str], cells: Cells) -> str:
    """Return a table in GitHub's Markdown.

    >>> print(markdown_table(["name", "n"], [["a|b", "10"]]))
    | name | n |
    | --- | ---: |
    | a\\|b | 10 |
    """
    rule = ["---", *("---:" for _ in headers[1:])]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (headers, *cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:]))


def csv_table(headers: Sequence[str], cells: Cells) -> str:
    """Return comma-separated values, quoted where needed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headers, *cells])
    return text.getvalue().rstrip("\n")


def latex_table(headers: Sequence[str], cells: Cells) -> str:
    r"""Return a `tabular` that needs no package.

    >>> print(latex_table(["name", "final"], [["a_b", "90% ± 1%"]]))
    \begin{tabular}{lr}
    \hline
    name & final \\
    \hline
    a\_b & 90\% $\pm$ 1\% \\
    \hline
    \end{tabular}
    """
    escaped = [[cell.translate(LATEX) for cell in row] for row in (headers, *cells)]
    rows = [" & ".join(row) + r" \\" for row in escaped]
    columns = "l" + "r" * (len(headers) - 1)
    body = [rows[0], r"\hline", *rows[1:]]
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\hline", *body, r"\hline", r"\end{tabular}"]
    )


LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "<": "$<$", ">": "$>$"}
    | {character: rf"\{character}" for character in "&%$#_{}"}
)
FORMATS: dict[str, Callable[[Sequence[str], Cells], str]] = {
    "text": text_table,
    "markdown": markdown_table,
    "csv": csv_table,
    "latex": latex_table,
}


def format_value(value: float, metric: str) -> str:
    """Format accuracies in percent, losses with three digits, other metrics with four.

    >>> format_value(0.925, "test_accuracy"), format_value(2e-6, "train_loss")
    ('92.50%', '2e-06')
    >>> format_value(0.87654, "test_f1"), format_value(123.456, "test_perplexity")
    ('0.8765', '123.5')
    """
    if is_accuracy(metric):
        return f"{100 * value:.2f}%"
    return f"{value:.3g}" if metric.endswith("loss") else f"{value:.4g}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "seed"), count(2000, "round")
    ('1 seed', '2,000 rounds')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits.

    >>> format_bytes(999), format_bytes(12_345), format_bytes(4.2e9)
    ('999 B', '12.3 kB', '4.2 GB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while power < len(units) - 1 and float(f"{count / 1000**power:.3g}") >= 1000:
        power += 1
    return f"{float(f'{count / 1000**power:.3g}'):g} {units[power]}"


def warning_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each run that diverged or dropped client updates."""
    lines = []
    for outcome in outcomes:
        name = f"{outcome.algorithm} (seed {outcome.seed})"
        dropped = sum(row.get("dropped", 0) for row in outcome.rows)
        if outcome.diverged_at is not None:
            at = outcome.diverged_at
            lines.append(f"{name} diverged at round {at}; lower its learning rates")
        elif dropped:
            lines.append(f"{name} left out {dropped} client updates that were not finite")
    return lines


def _rounds_cell(line: Line, rounds: int) -> str:
    if line.mean_rounds is None:
        missed = min(line.missed, default=line.final_round or rounds)
        return f">{missed} ({len(line.rounds)}/{line.seeds} seeds)"
    spread = f" ± {np.std(line.rounds, ddof=1):.1f}" if line.seeds > 1 else ""
    mean = f"{line.mean_rounds:.1f}{spread}" if spread else f"{line.mean_rounds:.0f}"
    return mean + _some(line.seeds, line.seeds + line.short)


def _speedup_header(lines: Sequence[Line]) -> str:
    if any(line.interval for line in lines):
        return "speed-up [95%]"
    seeds = max((line.seeds + line.short for line in lines), default=LEAST_SEEDS)
    if seeds >= LEAST_SEEDS or all(line.speedup is None for line in lines):
        return "speed-up"
    return f"speed-up ({seeds} seed{'s' if seeds > 1 else ''})"


def _speedup_cell(line: Line, several: bool) -> str:
    if line.speedup is None:
        return "-"
    over = f" over {line.reference}" if several else ""
    within = f" [{line.interval[0]:.2f}, {line.interval[1]:.2f}]" if line.interval else ""
    return f"{'>' if line.at_least else ''}{line.speedup:.2f}x{within}{over}"


def _final_cell(line: Line, metric: str, several: bool) -> str:
    if line.diverged:
        return "diverged" + _some(line.diverged, line.seeds + line.short)
    if np.isnan(line.finals).any():
        return "-"
    mean = format_value(float(np.mean(line.finals)), metric)
    text = mean if line.spread is None else f"{mean} ± {format_value(line.spread, metric)}"
    at = f" at round {line.final_round}" if several else ""
    return text + at + _some(len(line.finals), line.seeds + line.short)


def _some(number: int, seeds: int) -> str:
    """Return how many seeds a cell is of, where it is not all."""
    return f" ({number} of {seeds} seeds)" if number < seeds else ""
