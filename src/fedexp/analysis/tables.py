"""Tables as text, Markdown, CSV and LaTeX, and the table of a comparison."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

import numpy as np

from fedexp.analysis.summary import Line, spread_of
from fedexp.errors import unknown_name
from fedexp.runs.spec import Outcome

Cells = Sequence[Sequence[str]]


def comparison_table(
    lines: Sequence[Line], metric: str, target: float | None, rounds: int, smooth: int = 1
) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells: rounds to target, speed-up over FedAvg and final metric."""
    reach = "target" if target is None else format_value(target, metric)
    final = f"final {metric.replace('_', ' ')}"
    over = f" (last {smooth} rounds)" if smooth > 1 else ""
    headers = ["algorithm", f"rounds to {reach}", "speed-up", final + over]
    cells = [
        [
            line.algorithm,
            "-" if target is None else _rounds_cell(line, rounds),
            _speedup_cell(line),
            _final_cell(line, metric),
        ]
        for line in lines
    ]
    return headers, cells


def comparison_numbers(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Return the same for programs: one plain number per column, empty if there is none."""
    headers = "algorithm seeds reached rounds_mean rounds_std speedup at_least final_mean final_std"
    cells = []
    for line in lines:
        spread = spread_of(np.array(line.rounds)) if line.mean_rounds is not None else None
        final = float(np.mean(line.finals))
        numbers = [line.mean_rounds, spread, line.speedup, line.at_least, final, line.spread]
        counts = [line.algorithm, str(line.seeds), str(len(line.rounds))]
        cells.append([*counts, *("" if n is None or n != n else str(n) for n in numbers)])
    return headers.split(), cells


def render_table(format: str, headers: Sequence[str], cells: Cells) -> str:
    """Return the table in one of `FORMATS`."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
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
    return "\n".join("  ".join(_justify(row, widths)).rstrip() for row in rows)


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
    rows = [" & ".join(map(_latex, row)) + r" \\" for row in (headers, *cells)]
    columns = "l" + "r" * (len(headers) - 1)
    body = [rows[0], r"\hline", *rows[1:]]
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\hline", *body, r"\hline", r"\end{tabular}"]
    )


FORMATS: dict[str, Callable[[Sequence[str], Cells], str]] = {
    "text": text_table,
    "markdown": markdown_table,
    "csv": csv_table,
    "latex": latex_table,
}


def format_value(value: float, metric: str) -> str:
    """Format accuracies in percent, losses with three digits.

    >>> format_value(0.925, "test_accuracy"), format_value(2e-6, "train_loss")
    ('92.50%', '2e-06')
    """
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.3g}"


def warning_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each run that diverged or dropped client updates."""
    lines = []
    for each in outcomes:
        name = f"{each.spec.algorithm} (seed {each.spec.seed})"
        dropped = sum(row.get("dropped", 0) for row in each.rows)
        if each.diverged_at is not None:
            lines.append(f"{name} diverged at round {each.diverged_at}; lower its learning rates")
        elif dropped:
            lines.append(f"{name} left out {dropped} client updates that were not finite")
    return lines


def _rounds_cell(line: Line, rounds: int) -> str:
    if line.mean_rounds is None:
        return f">{rounds} ({len(line.rounds)}/{line.seeds} seeds)"
    spread = f" ± {np.std(line.rounds, ddof=1):.1f}" if line.seeds > 1 else ""
    return f"{line.mean_rounds:.1f}{spread}" if spread else f"{line.mean_rounds:.0f}"


def _speedup_cell(line: Line) -> str:
    if line.speedup is None:
        return "-"
    return f"{'>' if line.at_least else ''}{line.speedup:.2f}x"


def _final_cell(line: Line, metric: str) -> str:
    if np.isnan(line.finals).any():
        return "diverged"
    mean = format_value(float(np.mean(line.finals)), metric)
    return mean if line.spread is None else f"{mean} ± {format_value(line.spread, metric)}"


def _justify(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = (cell.ljust if i == 0 else cell.rjust for i, cell in enumerate(row))
    return [first(widths[0]), *(f(w) for f, w in zip(others, widths[1:], strict=True))]


def _latex(cell: str) -> str:
    """Escape LaTeX's special characters."""
    escaped = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}"}
    escaped |= {c: rf"${c}$" for c in "<>"} | {c: rf"\{c}" for c in "&%$#_{}"}
    escaped["^"] = r"\textasciicircum{}"
    return "".join(escaped.get(character, character) for character in cell)
