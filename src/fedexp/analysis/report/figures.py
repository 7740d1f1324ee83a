"""The curves as a static figure: one column per task, one row per metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.plots import colour, label, new_figure, save
from fedexp.analysis.report.charts import MPL_DASHES, main_metric, title
from fedexp.analysis.report.sections import Section, Series
from fedexp.analysis.summary import spans_decades
from fedexp.errors import UsageError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
PANEL = (3.3, 2.6)  # inches
CHARACTERS_PER_INCH = 13  # of the legend


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
