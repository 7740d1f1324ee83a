"""The files a study writes: table.md, table.csv, summary.json and a figure in three formats.

The figures follow the paper's layouts: one panel per task, one panel per metric, or a grid of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp import __version__
from fedexp.analysis import plots
from fedexp.analysis.tables import count, render_table
from fedexp.errors import UsageError
from fedexp.reproduce.study import Findings, Plan
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ("figure.png", "figure.svg", "figure.pdf")
NOT_COMPARABLE = "the published figures are not comparable line by line with what follows"
CAUTION = " (shrunk, they prove little)"
PARTIAL = "cannot be compared with the paper's figures line by line"
FEWER_SEEDS = "the means are less certain than the paper's"


def head_lines(plan: Plan) -> list[str]:
    """Return the lines above the table; how the study was shrunk comes first."""
    lines = []
    if plan.shrunk:
        caution = FEWER_SEEDS if plan.comparable else NOT_COMPARABLE
        if plan.comparable and plan.partial:
            caution = f"{' and '.join(plan.partial)} {PARTIAL}"
        lines.append(f"{plan.deviation.upper()}, so {caution}:")
        lines += [f"  {line}" for line in plan.shrunk]
    lines += [plan.study.title, _settings(plan)]
    return [*lines, *(f"note: {line}" for line in (*plan.left_out, *plan.study.remarks))]


def _settings(plan: Plan) -> str:
    """Return mode, rounds and arithmetic; a study without runs, such as toy, has no modes."""
    rounds = count(plan.rounds, "round")
    if not plan.jobs:
        return rounds
    every = max(job.experiment.evaluate_every or 1 for job in plan.jobs)
    settings = f"mode {plan.request.mode}, {rounds}, evaluated every {every}"
    return f"{settings}, arithmetic in {plan.arithmetic}"


def source_lines(findings: Findings) -> list[str]:
    """Return the place of each published column in the paper, with its caveat."""
    sources = [column.source() for column in findings.table.columns]
    return [
        f"paper: {each.place}, {each.meaning}{f' ({each.note})' if each.note else ''}"
        for each in sources
        if each
    ]


def render(plan: Plan, findings: Findings, format: str) -> str:
    """Return the study as text, Markdown, CSV or LaTeX; CSV holds plain numbers, for programs."""
    if format == "csv":
        return render_table(format, *findings.table.numbers(plan.comparable, plan.partial)) + "\n"
    headers = findings.table.headers()
    cells = findings.table.cells(plan.comparable, plan.partial)
    if format == "text":  # pad the second column, which holds names: the table aligns it right
        width = max(len(row[1]) for row in (headers, *cells))
        headers, *cells = [[row[0], row[1].ljust(width), *row[2:]] for row in (headers, *cells)]
    grid = render_table(format, headers, cells)
    head = [*head_lines(plan), *source_lines(findings)]
    claims = f"Claims of the paper, judged on these runs{CAUTION if plan.shrunk else ''}:"
    checks = [check.line() for check in findings.checks]
    if format == "latex":
        lines = [*(f"% {line.strip()}" for line in (*head, claims, *checks)), grid]
    elif format == "markdown":
        quoted = [f"> {line.strip()}  " for line in head]
        lines = [*quoted, "", grid, "", claims, "", *(f"- {line}" for line in checks)]
    else:
        lines = [*head, "", grid, "", claims, *(f"  {line}" for line in checks)]
    return "\n".join(lines) + "\n"


def write_all(folder: Path, plan: Plan, findings: Findings) -> list[Path]:
    """Write all files of a study and return their paths."""
    texts = {
        "table.md": render(plan, findings, "markdown"),
        "table.csv": render(plan, findings, "csv"),
        "summary.json": json.dumps(summary(plan, findings), indent=2, allow_nan=False) + "\n",
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    figure = findings.draw()
    for name in FIGURES:
        plots.save(figure, folder / name)
    return [folder / name for name in (*texts, *FIGURES)]


def check_folder(folder: Path) -> None:
    """Raise `UsageError` before hours of work if the results cannot be written."""
    for name in FIGURES:
        plots.check_writable(folder / name)


def summary(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Return the study as JSON values."""
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
                "reading": each.reading,
                "claim": each.claim.text,
                "place": each.claim.place,
                "criterion": each.claim.criterion,
                "seeds": each.seeds,
                "holds": each.holds,
                "seen": each.seen,
            }
            for each in findings.checks
        ],
    }


def figure_title(plan: Plan) -> str:
    """Return the study's title, marked where the study was shrunk."""
    return f"{plan.study.title} ({plan.deviation})" if plan.shrunk else plan.study.title


Groups = Mapping[str, Mapping[str, Sequence[Outcome]]]
# Settings of one algorithm, e.g. values of eps: dark to light, distinguishable in grey as well.
SHADES = ("#440154", "#3B528B", "#21918C", "#5EC962", "#E3A008")
UNSMOOTHED = ("synthetic",)  # deterministic, and drawn unsmoothed in the paper
ALL = ("test_accuracy", "train_loss", "train_accuracy", "server_lr")


def study_figure(
    groups: Groups,
    title: str,
    metrics: Sequence[str],
    *,
    targets: Mapping[str, float] | None = None,
    window: int = 1,
    in_a_row: bool = False,
) -> Figure:
    """Draw one row of panels per metric, one column per task, as in the paper's Figure 3.

    Args:
        groups: outcomes by task and series, one per seed.
        title: of the figure.
        metrics: fields of the records.
        targets: of the first metric, by task; drawn as a dotted line.
        window: rounds of the moving average.
        in_a_row: one task in one row of panels, which do not name it.
    """
    tasks = list(groups)
    columns, rows = (len(metrics), 1) if in_a_row else (len(tasks), len(metrics))
    figure, axes = plots.new_figure(columns, rows=rows)
    for row, metric in enumerate(metrics):
        for column, task in enumerate(tasks):
            panel = axes[row * len(tasks) + column]
            draw_panel(panel, groups[task], metric, 1 if task in UNSMOOTHED else window)
            name = "" if row or in_a_row else task
            plots.label(panel, "round", plots.metric_title(metric), name)
            if row == 0 and targets and task in targets:
                plots.draw_target(panel, targets[task])
    _add_legend(axes)
    plots.entitle(figure, title)
    return figure


def task_figure(
    groups: Groups,
    title: str,
    metrics: Sequence[str],
    targets: Mapping[str, float] | None = None,
) -> Figure:
    """Draw one task in a row of panels, one per metric, as in the paper's Figures 8 to 11.

    Several tasks have one panel each, with the first metric.
    """
    if len(groups) != 1:
        return study_figure(groups, title, metrics[:1], targets=targets)
    named = f"{title}: {next(iter(groups))}"
    return study_figure(groups, named, metrics, targets=targets, in_a_row=True)


def draw_panel(
    axes: Axes, series: Mapping[str, Sequence[Outcome]], metric: str, window: int = 1
) -> None:
    """Draw the mean of each series as a line and one standard deviation as a band.

    An algorithm has its own colour, and its readings of eps have it too, in other line styles. For
    settings of one algorithm the colours are shades in order.
    """
    algorithms = [name.partition(" (")[0] for name in series]
    shades = [plots.Style(shade, shade) for shade in islice(cycle(SHADES), len(series))]
    if all(name in plots.COLOURS for name in algorithms):
        readings = [algorithms[:at].count(name) for at, name in enumerate(algorithms)]
        shades = [
            plots.Style(*plots.COLOURS[n], k) for n, k in zip(algorithms, readings, strict=True)
        ]
    plots.draw_curves(axes, metric, series, dict(zip(series, shades, strict=True)), window)


def _add_legend(axes: Sequence[Axes]) -> None:
    """Hide empty panels (a task may lack a metric); put the legend into the fullest one."""
    drawn = [panel for panel in axes if panel.get_legend_handles_labels()[1]]
    for panel in axes:
        panel.set_visible(panel in drawn)
    if drawn:
        fullest = max(drawn, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
        fullest.legend(frameon=False, fontsize=8)
