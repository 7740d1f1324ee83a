"""Figures: the style all of them share, writing them to disk, and the figure of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.summary import Curve, mean_and_spread, spans_decades
from fedexp.errors import UsageError
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, safe for colour-blind readers; one per algorithm in all figures.
COLOURS = {
    "fedexp": "#D55E00",
    "fedavg": "#0072B2",
    "scaffold": "#009E73",
    "fedadagrad": "#CC79A7",
    "fedprox": "#56B4E9",
    "fedadam": "#E69F00",
    "fedavgm": "#8C6D31",
    "fedyogi": "#7F7F7F",
    "scaffold-exp": "#004D40",
    "fedexp-m": "#8B0000",
    "fedprox-exp": "#3B2F8F",
}

CHARACTERS_PER_INCH = 11  # of a title
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def colour(name: str) -> str:
    """Return the colour of an algorithm; black for an unknown one."""
    return COLOURS.get(name, "#000000")


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
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(True, color="#DDDDDD", linewidth=0.6)
        each.set_axisbelow(True)
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


NAMES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
    "server_lr": "server step size",
}


def comparison_figure(
    outcomes: Sequence[Outcome], metric: str, target: float | None, title: str, smooth: int = 1
) -> Figure:
    """Draw the metric, the training loss and the server step size, one panel each.

    Mean and spread are over seeds and the last `smooth` rounds.
    """
    panels = list(dict.fromkeys([metric, "train_loss", "server_lr"]))
    figure, axes = new_figure(len(panels))
    for name, panel in zip(panels, axes, strict=True):
        for algorithm, own in _by_algorithm(outcomes, name).items():
            _draw_band(panel, own, algorithm, smooth)
        label(panel, "round", NAMES.get(name, name))
        curves = [outcome.curve(name) for outcome in outcomes]
        if not name.endswith("accuracy") and spans_decades(curves):
            log_scale(panel)
    if target is not None:
        axes[0].axhline(target, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
    axes[0].legend(frameon=False, fontsize=9)
    entitle(figure, title)
    return figure


def _by_algorithm(outcomes: Sequence[Outcome], name: str) -> dict[str, list[Curve]]:
    """Return the curves of each algorithm, one per seed."""
    groups: dict[str, list[Curve]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.spec.algorithm, []).append(outcome.curve(name))
    return groups


def _draw_band(axes: Axes, curves: Sequence[Curve], algorithm: str, smooth: int = 1) -> None:
    """Draw the mean as a line and one standard deviation as a band."""
    rounds, mean, spread = mean_and_spread(curves, smooth)
    if not len(rounds):
        return
    axes.plot(rounds, mean, color=colour(algorithm), linewidth=1.6, label=algorithm)
    if spread.any():
        low = np.maximum(mean - spread, np.nanmin([np.nanmin(curve) for curve in curves]))
        axes.fill_between(rounds, low, mean + spread, color=colour(algorithm), alpha=0.15, lw=0)
