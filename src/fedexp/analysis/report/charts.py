"""The charts of a report: which metrics, in which colours, as JSON for the page and as figures.

page.js draws what `section_payload` returns; `write_figures` draws the same curves with matplotlib,
one column per task and one row per metric. An algorithm has one colour, and one dash pattern for
each of its settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.plots import NAMES, colour, label, new_figure, save
from fedexp.analysis.report.sections import WINDOW, Section, Series, status
from fedexp.analysis.summary import Band, Curve, spans_decades
from fedexp.analysis.tables import format_value
from fedexp.errors import UsageError, require, unknown_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of `fedexp.analysis.plots`, lightened for a dark page.
DARK = {
    "fedexp": "#F5843C",
    "fedavg": "#4393DB",
    "scaffold": "#2BC497",
    "fedadagrad": "#E08FBE",
    "fedprox": "#93D7FF",
    "fedadam": "#F2B632",
    "fedavgm": "#C9A866",
    "fedyogi": "#A8A8A8",
    "scaffold-exp": "#A4E8D4",
    "fedexp-m": "#FF9C8F",
    "fedprox-exp": "#B7ABFF",
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SVG_DASHES = ("none", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3")
MPL_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2)))

DEFAULT_METRICS = ("test_accuracy", "train_accuracy", "train_loss")  # the first that a task has
CHARTS = ("test_accuracy", "train_accuracy", "test_loss", "train_loss", "server_lr", "diversity")
TITLES = {**NAMES, "diversity": "diversity ratio", "eps_share": "share of eps"}
FORMATS = ("png", "svg", "pdf")
PANEL = (3.3, 2.6)  # inches
CHARACTERS_PER_INCH = 13  # of a figure's legend
Payload = dict[str, Any]


def dark_colour(algorithm: str) -> str:
    """Return the colour of an algorithm on a dark page; white for an unknown one."""
    return DARK.get(algorithm, "#F2F2F2")


def chart_names(section: Section, wanted: Sequence[str]) -> list[str]:
    """Return the charts of a section: the wanted or the default ones that it has data for."""
    return [name for name in wanted or CHARTS if name in section.names]


def check_metrics(sections: Sequence[Section], wanted: Sequence[str]) -> None:
    """Raise `UsageError` for a metric that no run has."""
    known = {name for section in sections for name in section.names} - {"round"}
    for name in wanted:
        if name not in known:
            raise unknown_name("metric", name, known)


def main_metric(section: Section, wanted: Sequence[str]) -> str:
    """Return the metric that the table compares: a wanted one, the task's own, or a default."""
    for name in (*wanted, section.runs[0].environment.get("metric"), *DEFAULT_METRICS):
        if name in section.names and str(name).endswith(("accuracy", "loss")):
            return str(name)
    return DEFAULT_METRICS[-1]


def section_payload(
    section: Section, names: Sequence[str], metric: str, target: float | None
) -> Payload:
    """Return what page.js needs to draw a section."""
    keys = [
        {
            "name": series.label,
            "light": colour(series.algorithm),
            "dark": dark_colour(series.algorithm),
            "dash": DASHES[series.variant % len(DASHES)],
        }
        for series in section.series
    ]
    charts = [_chart(section, name, target if name == metric else None) for name in names]
    return {"series": keys, "charts": charts}


def describe(section: Section, name: str) -> str:
    """Return a chart in words, for screen readers."""
    ends = []
    for series in section.series:
        band = series.band(name)
        if band.rounds.size:
            last = format_value(float(band.mean[-1]), name)
            ends.append(f"{series.label} {last} at round {band.rounds[-1]:.0f}")
    return f"Line chart of {title(name)} against rounds. It ends with {'; '.join(ends)}."


def title(name: str) -> str:
    """Return the title of a metric's chart."""
    return TITLES.get(name, name.replace("_", " "))


def _chart(section: Section, name: str, target: float | None) -> Payload:
    curves = [_curve(at, series, name) for at, series in enumerate(section.series)]
    every = [curve for series in section.series for curve in series.curves(name)]
    return {
        "name": name,
        "percent": name.endswith("accuracy"),
        "log": not name.endswith("accuracy") and spans_decades(every),
        "target": target,
        "curves": [curve for curve in curves if curve["raw"]["rounds"]],
    }


def _curve(at: int, series: Series, name: str) -> Payload:
    return {
        "series": at,
        "runs": len(series.runs),
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
        known = np.flatnonzero(~np.isnan(curve))
        text = status(run)
        if known.size and text.startswith(("diverged", "unfinished")):
            ends.append(
                {
                    "round": int(known[-1]) + 1,
                    "value": _short(curve[known[-1:]])[0],
                    "seed": run.spec["seed"],
                    "status": text,
                }
            )
    return ends


def _short(values: Curve) -> list[float | None]:
    """Round to six digits; None for what is not finite."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def write_figures(sections: Sequence[Section], wanted: Sequence[str], folder: Path) -> list[Path]:
    """Write the figure `curves` in every format; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; name another") from None
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
            lines |= _draw_panel(panel, section, name)
            label(panel, "round", title(name), section.title if row == 0 else "")
    width = CHARACTERS_PER_INCH * PANEL[0] * len(sections) // (max(map(len, lines)) + 6)
    style: dict[str, Any] = {"loc": "outside upper center", "frameon": False, "fontsize": 9}
    figure.legend(lines.values(), lines.keys(), ncols=max(1, min(len(lines), int(width))), **style)
    return figure


def _rows(sections: Sequence[Section], wanted: Sequence[str]) -> list[list[str | None]]:
    """Return the metric of each panel, row by row; None for a panel that stays empty."""
    columns = []
    for section in sections:
        names = list(wanted) or [main_metric(section, wanted), "train_loss", "server_lr"]
        new = [name not in names[:at] and name in section.names for at, name in enumerate(names)]
        columns.append([name if here else None for name, here in zip(names, new, strict=True)])
    return [list(row) for row in zip(*columns, strict=True) if any(row)]


def _draw_panel(axes: Axes, section: Section, name: str) -> dict[str, Any]:
    lines = {}
    for series in section.series:
        line = _draw_series(axes, series, name)
        if line is not None:
            lines[series.label] = line
    every = [curve for series in section.series for curve in series.curves(name)]
    if spans_decades(every) and not name.endswith("accuracy"):
        axes.set_yscale("log")
    if name.endswith("accuracy"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    return lines


def _draw_series(axes: Axes, series: Series, name: str) -> Any:
    """Draw the mean, pale where some seeds have ended, and a band of one standard deviation."""
    band = series.band(name)
    if not band.rounds.size:
        return None
    style: dict[str, Any] = {
        "color": colour(series.algorithm),
        "linestyle": MPL_DASHES[series.variant % len(MPL_DASHES)],
    }
    axes.plot(band.rounds, band.mean, linewidth=1.0, alpha=0.5, **style)
    complete = np.where(band.seeds == len(series.runs), band.mean, np.nan)
    (line,) = axes.plot(band.rounds, complete, linewidth=1.6, **style)
    if band.std.any():
        axes.fill_between(band.rounds, band.low, band.high, color=style["color"], alpha=0.15, lw=0)
    return line
