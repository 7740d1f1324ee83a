"""Tables of a comparison, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedexp.experiments.compare import Line, Outcome


def comparison_table(
    lines: Sequence[Line], metric: str, target: float | None, rounds: int
) -> tuple[list[str], list[list[str]]]:
    """Headers and cells: rounds to target, speed-up over FedAvg, final metric, over seeds."""
    reach = f"rounds to {format_value(target, metric)}" if target is not None else "rounds"
    headers = ["algorithm", reach, "speed-up", f"final {metric.replace('_', ' ')}"]
    cells = [
        [
            line.algorithm,
            _rounds_cell(line, rounds),
            _speedup_cell(line),
            _final_cell(line, metric),
        ]
        for line in lines
    ]
    return headers, cells


def text_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces; the first to the left, the others to the right.

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


def format_value(value: float, metric: str) -> str:
    """Accuracies in percent, losses in short scientific form.

    >>> format_value(0.925, "test_accuracy"), format_value(2e-6, "train_loss")
    ('92.50%', '2e-06')
    """
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.3g}"


def warning_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each run that diverged or left client updates out."""
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
    if line.seeds == 1:
        return mean
    return f"{mean} ± {format_value(float(np.std(line.finals, ddof=1)), metric)}"


def _justify(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = (cell.ljust if i == 0 else cell.rjust for i, cell in enumerate(row))
    return [first(widths[0]), *(f(w) for f, w in zip(others, widths[1:], strict=True))]
