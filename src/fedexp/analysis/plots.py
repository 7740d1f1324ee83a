"""Figures: the style all of them share, writing them to disk, and the figure of a comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.summary import Curve, is_logarithmic, metric_band, shown_range
from fedexp.errors import UsageError
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One per algorithm in all figures; the first are Okabe and Ito's, safe for colour-blind readers.
COLOURS = {  # on a light page, and lightened for a dark one
    "fedexp": ("#D55E00", "#F5843C"),
    "fedavg": ("#0072B2", "#4393DB"),
    "scaffold": ("#009E73", "#2BC497"),
    "fedadagrad": ("#CC79A7", "#E08FBE"),
    "fedprox": ("#56B4E9", "#93D7FF"),
    "fedadam": ("#E69F00", "#F2B632"),
    "fedavgm": ("#8C6D31", "#C9A866"),
    "diloco": ("#B8860B", "#FFD75E"),
    "fedyogi": ("#7F7F7F", "#A8A8A8"),
    "scaffold-exp": ("#004D40", "#A4E8D4"),
    "fedexp-m": ("#8B0000", "#FF9C8F"),
    "fedprox-exp": ("#3B2F8F", "#B7ABFF"),
    "fedams": ("#9C9A00", "#B9BC2E"),
    "fedexprox": ("#8E4BD0", "#C58BFF"),
    "fedexprox-grads": ("#D6219C", "#FF4FD8"),
    "fedexprox-stops": ("#4F8A10", "#A6DB5B"),
    "fedhyper": ("#00A5B5", "#4FE3F0"),
    "fednova": ("#5B4636", "#C4A08A"),
}
# The same of algorithms that are not of this package, in their order.
OWN = (
    ("#000000", "#F2F2F2"),
    ("#882255", "#F06CB8"),
    ("#1B7837", "#7CE07C"),
    ("#332288", "#CDBEFF"),
    ("#888888", "#7C7C7C"),
    ("#661100", "#E6E65C"),
)
DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2)))  # as matplotlib takes them

CHARACTERS_PER_INCH = 11  # of a title
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Style:
    """How the line of a series looks.

    Attributes:
        light: colour on a light page.
        dark: colour on a dark page.
        dash: index of the dash pattern, from the first after the last.
    """

    light: str
    dark: str
    dash: int = 0


def styles(algorithms: Iterable[str]) -> dict[str, Style]:
    """Return a style for each algorithm; those of the user's own differ in colour and dashes.

    >>> styles(["fedexp", "mine", "yours"])["yours"]
    Style(light='#882255', dark='#F06CB8', dash=2)
    """
    names = list(dict.fromkeys(algorithms))
    others = [name for name in names if name not in COLOURS]
    of_package = {name: Style(*COLOURS[name]) for name in names if name in COLOURS}
    return of_package | {
        name: Style(*OWN[at % len(OWN)], dash=(at + 1) % len(DASHES))
        for at, name in enumerate(others)
    }


def colour(name: str) -> str:
    """Return the colour of an algorithm of this package; black for an unknown one."""
    return COLOURS.get(name, OWN[0])[0]


def new_figure(
    panels: int, width: float = 4.6, height: float = 3.7, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row. Uses no global state and no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "drawing needs matplotlib; install it with: pip install 'fedexp[plots]'"
        ) from None
    figure = Figure(figsize=(width * panels, height * rows), layout="constrained")
    axes = figure.subplots(rows, panels, squeeze=False).ravel()
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, list(axes)


def log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic.

    Powers are written in Unicode: mathtext would build its parser first, which is slow.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_of_ten(value: float) -> str:
    """Format a positive value as the nearest power of ten.

    >>> power_of_ten(1e-12), power_of_ten(10)
    ('10⁻¹²', '10¹')
    """
    return "10" + str(round(math.log10(value))).translate(SUPERSCRIPT)


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the suffix of the name decides the format."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    except ValueError as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise `UsageError` before hours of work if a figure cannot be written.

    Args:
        path: of the figure.
        option: the command-line option that named it.
    """
    figure, _ = new_figure(1)
    formats = sorted(figure.canvas.get_supported_filetypes())
    ending = path.suffix.removeprefix(".").lower()
    if ending not in formats:
        raise UsageError(f"cannot write {path}: end its name in one of {', '.join(formats)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink(missing_ok=True)  # another process may check the same path
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}"
        raise UsageError(f"{reason}; choose another {option}") from None


def label(axes: Any, x: str, y: str, title: str = "") -> None:
    """Label the axes and set the title of the panel."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=11)


def entitle(figure: Figure, title: str) -> None:
    """Set the title of a whole figure, wrapped to its width."""
    figure.suptitle(fill(title, int(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize=12)


TITLES = {
    "server_lr": "server step size",
    "diversity": "diversity ratio",
    "eps_share": "share of eps",
}


def metric_title(name: str) -> str:
    """Return the title of a metric's chart.

    >>> metric_title("server_lr"), metric_title("train_accuracy_worst_decile")
    ('server step size', 'training accuracy, worst decile')
    """
    plain = re.sub(r"^train ", "training ", name.replace("_", " "))
    return TITLES.get(name, plain.replace(" worst decile", ", worst decile"))


def comparison_figure(
    outcomes: Sequence[Outcome],
    metric: str,
    target: float | None,
    title: str,
    smooth: int = 1,
    further: Iterable[float] = (),
) -> Figure:
    """Draw the metric, the training loss and the server step size, one panel each.

    Mean and spread are over seeds and the last `smooth` rounds; `further` are targets as well.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.algorithm, []).append(outcome)
    panels = list(dict.fromkeys([metric, "train_loss", "server_lr"]))
    figure, axes = new_figure(len(panels))
    for name, panel in zip(panels, axes, strict=True):
        draw_curves(panel, name, groups, styles(groups), smooth)
        label(panel, "round", metric_title(name))
    for value in (*(() if target is None else (target,)), *further):
        draw_target(axes[0], value)
    axes[0].legend(frameon=False, fontsize=9)
    entitle(figure, title)
    return figure


def draw_target(axes: Axes, value: float) -> None:
    """Draw a value to reach."""
    axes.axhline(value, color="#555555", linewidth=0.9, linestyle=":", zorder=1)


def draw_curves(
    axes: Axes,
    metric: str,
    series: Mapping[str, Sequence[Outcome]],
    looks: Mapping[str, Style],
    smooth: int = 1,
    seeds: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Draw a line with its band for each series, the mean over its seeds; return the lines.

    Args:
        axes: the panel.
        metric: field of the records.
        series: outcomes by label, one per seed.
        looks: styles by label.
        smooth: rounds of the moving average.
        seeds: how many seeds make the mean complete, by label; all where it is not given.
    """
    lines: dict[str, Any] = {}
    for name, outcomes in series.items():
        curves = [outcome.curve(metric) for outcome in outcomes]
        line = draw_band(axes, curves, metric, looks[name], smooth, seeds.get(name), name)
        lines |= {} if line is None else {name: line}
    fit_axis(axes, [outcome for outcomes in series.values() for outcome in outcomes], metric)
    return lines


def draw_band(
    axes: Axes,
    curves: Sequence[Curve],
    name: str,
    style: Style,
    smooth: int,
    seeds: int | None,
    text: str,
) -> Any:
    """Draw the mean, pale where some seeds have ended, in a band of one standard deviation.

    Args:
        axes: the panel.
        curves: one per seed.
        name: of the metric.
        style: of the series.
        smooth: rounds of the moving average.
        seeds: how many seeds make the mean complete; all when None.
        text: the label in the legend.

    Returns:
        The line; None without a value.
    """
    band = metric_band(name, curves, smooth)
    if not band.rounds.size:
        return None
    look: dict[str, Any] = {
        "color": style.light,
        "linestyle": DASHES[style.dash % len(DASHES)],
        "marker": "o" if band.rounds.size == 1 else None,
    }
    complete = np.where(band.seeds >= (seeds or len(curves)), band.mean, np.nan)
    if np.isnan(complete).any():
        axes.plot(band.rounds, band.mean, linewidth=1.0, alpha=0.5, **look)
    (line,) = axes.plot(band.rounds, complete, linewidth=1.6, label=text, **look)
    if band.std.any():
        axes.fill_between(band.rounds, band.low, band.high, color=style.light, alpha=0.15, lw=0)
    return line


def fit_axis(axes: Axes, outcomes: Sequence[Outcome], metric: str) -> None:
    """Make the vertical axis logarithmic where that helps, and leave out runs that diverged."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds
    is_log = is_logarithmic(outcomes, metric)
    if is_log:
        log_scale(axes)
    limits = shown_range(outcomes, metric)
    if limits is not None:
        low, high = limits
        margin = 0.05 * (high - low or abs(high) or 1.0)
        ratio = (high / low) ** 0.05 if is_log else 1.0
        axes.set_ylim(*((low / ratio, high * ratio) if is_log else (low - margin, high + margin)))
