"""The charts of a report: which metrics, in which colours, as JSON for the page and as figures.

page.js draws what `section_payload` returns; `write_figures` draws the same curves with matplotlib,
one column per task and one row per metric. An algorithm has one colour, and one dash pattern for
each of its settings. Runs that diverged do not decide the range of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.plots import draw_curves, label, metric_title, new_figure, save
from fedexp.analysis.report.sections import WINDOW, Section, Series, Targets, status
from fedexp.analysis.summary import Band, Curve, is_accuracy, is_logarithmic, shown_range
from fedexp.analysis.tables import format_value
from fedexp.errors import check_name, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SVG_DASHES = ("none", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3")

DEFAULT_METRICS = ("test_accuracy", "train_accuracy", "train_loss")  # the first that a task has
FIRST = ("test_accuracy", "train_accuracy", "test_loss", "train_loss")  # charts, after the goal
LAST = ("server_lr", "diversity")
FORMATS = ("png", "svg", "pdf")
PANEL = (3.3, 2.6)  # inches
CHARACTERS_PER_INCH, TITLE_PER_INCH = 13, 10  # of a figure's legend, of a panel's title
Payload = dict[str, Any]


def chart_names(section: Section, wanted: Sequence[str]) -> list[str]:
    """Return the charts of a section: the wanted or the default ones that it has data for.

    The default is the goal, accuracies and losses, all other metrics of the task, and the server.
    """
    if wanted:
        return [name for name in wanted if name in section.names]
    goal = [section.goal.metric] if section.goal else []
    metrics = sorted(name for name in section.names if name.startswith(("test_", "train_")))
    ordered = dict.fromkeys([*goal, *FIRST, *metrics, *LAST])
    return [name for name in ordered if name in section.names]


def check_metrics(sections: Sequence[Section], wanted: Sequence[str]) -> None:
    """Raise `UsageError` for a metric that no run has."""
    names = {name for section in sections for name in section.names} - {"round"}
    for name in wanted:
        check_name("metric", name, names)


def main_metric(section: Section, wanted: Sequence[str]) -> str:
    """Return the metric that the table compares: a wanted one, the task's goal, or a default."""
    goal = [section.goal.metric] if section.goal else []
    for name in (*wanted, *goal, *DEFAULT_METRICS):
        is_metric = name.startswith(("test_", "train_")) or section.direction(name) is not None
        if name in section.names and is_metric:
            return name
    return DEFAULT_METRICS[-1]


def section_payload(section: Section, wanted: Sequence[str], targets: Targets) -> Payload:
    """Return what page.js needs to draw a section."""
    metric = main_metric(section, wanted)
    goals = {metric: targets.of(section, metric)}
    keys = [
        {
            "name": series.label,
            "light": series.style.light,
            "dark": series.style.dark,
            "dash": DASHES[series.style.dash % len(DASHES)],
        }
        for series in section.series
    ]
    charts = [_chart(section, name, goals.get(name, [])) for name in chart_names(section, wanted)]
    return {"series": keys, "charts": charts}


def describe(section: Section, name: str) -> str:
    """Return a chart in words, for screen readers."""
    ends = []
    for series in section.series:
        band = series.band(name)
        if band.rounds.size:
            last = format_value(float(band.mean[-1]), name)
            ends.append(f"{series.label} {last} at round {band.rounds[-1]:.0f}")
    return f"Line chart of {metric_title(name)} against rounds. It ends with {'; '.join(ends)}."


def _chart(section: Section, name: str, targets: list[float]) -> Payload:
    curves = [_curve(at, series, name) for at, series in enumerate(section.series)]
    outcomes = [run.outcome() for run in section.runs]
    return {
        "name": name,
        "percent": is_accuracy(name),
        "log": is_logarithmic(outcomes, name),
        "range": shown_range(outcomes, name),
        "targets": targets,
        "curves": [curve for curve in curves if curve["raw"]["rounds"]],
    }


def _curve(at: int, series: Series, name: str) -> Payload:
    return {
        "series": at,
        "runs": len(series.runs),
        "seeds": series.seeds,
        "raw": _points(series.band(name)),
        "smooth": _points(series.band(name, WINDOW)),
        "ends": _ends(series, name),
    }


def _points(band: Band) -> Payload:
    return {
        **{name: _short(values) for name, values in vars(band).items()},
        "rounds": band.rounds.astype(int).tolist(),
        "seeds": band.seeds.astype(int).tolist(),
    }


def _ends(series: Series, name: str) -> list[Payload]:
    """Return the last point of each run that diverged or is unfinished."""
    ends = []
    for run, curve in zip(series.runs, series.curves(name), strict=True):
        evaluated = np.flatnonzero(~np.isnan(curve))
        text = status(run)
        if evaluated.size and text.startswith(("diverged", "unfinished")):
            ends.append(
                {
                    "round": int(evaluated[-1]) + 1,
                    "value": _short(curve[evaluated[-1:]])[0],
                    "seed": run.spec["seed"],
                    "status": text,
                }
            )
    return ends


def _short(values: Curve) -> list[float | None]:
    """Round to six digits; None for what is not finite."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def write_figures(sections: Sequence[Section], wanted: Sequence[str], folder: Path) -> list[Path]:
    """Write the figure `curves` in every format to a folder that exists; return the files."""
    figure = curves_figure(sections, wanted)
    paths = [folder / f"curves.{ending}" for ending in FORMATS]
    for path in paths:
        save(figure, path)
    return paths


def curves_figure(sections: Sequence[Section], wanted: Sequence[str] = ()) -> Figure:
    """Draw one panel per task and metric, with one legend for all."""
    rows = _rows(sections, wanted)
    require(
        bool(rows), "no run has finished a round yet, so there is nothing to draw; wait for one"
    )
    figure, axes = new_figure(len(sections), *PANEL, rows=len(rows))
    lines: dict[str, Any] = {}
    for panel, (row, column) in zip(axes, np.ndindex(len(rows), len(sections)), strict=True):
        section, name = sections[column], rows[row][column]
        panel.set_visible(name is not None)
        if name is not None:
            series = {each.label: each.outcomes() for each in section.series}
            looks = {each.label: each.style for each in section.series}
            seeds = {each.label: each.seeds for each in section.series}
            lines |= draw_curves(panel, name, series, looks, seeds=seeds)
            if is_accuracy(name):
                panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            heading = fill(section.title, int(TITLE_PER_INCH * PANEL[0])) if row == 0 else ""
            label(panel, "round", metric_title(name), heading)
    most = int(CHARACTERS_PER_INCH * PANEL[0] * len(sections))
    texts = [fill(text, most - 6) for text in lines]
    width = most // (max(len(line) for text in texts for line in text.splitlines()) + 6)
    style: dict[str, Any] = {"loc": "outside upper center", "frameon": False, "fontsize": 9}
    figure.legend(lines.values(), texts, ncols=max(1, min(len(lines), width)), **style)
    return figure


def _rows(sections: Sequence[Section], wanted: Sequence[str]) -> list[list[str | None]]:
    """Return the metric of each panel, row by row; None for a panel that stays empty."""
    columns = []
    for section in sections:
        names = list(wanted) or [main_metric(section, wanted), "train_loss", "server_lr"]
        new = [name not in names[:at] and name in section.names for at, name in enumerate(names)]
        columns.append([name if here else None for name, here in zip(names, new, strict=True)])
    return [list(row) for row in zip(*columns, strict=True) if any(row)]
