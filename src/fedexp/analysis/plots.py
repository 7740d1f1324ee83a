"""How every figure looks, and how it reaches the disk.

The figure of a comparison: mean and spread over seeds, and the server step size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.summary import spread_of
from fedexp.errors import UsageError
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by nearly everyone; an algorithm keeps its own everywhere.
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

LETTERS_AN_INCH = 11  # of a title
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def colour(name: str) -> str:
    """The colour of an algorithm; black for one that has none."""
    return COLOURS.get(name, "#000000")


def new_figure(
    panels: int, width: float = 4.6, height: float = 3.7, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Panels row after row. Needs matplotlib; uses no global state and no screen."""
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
    """A logarithmic vertical axis, for values over several decades.

    Powers are written in plain characters: to set formulas, matplotlib builds a parser first.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_of_ten(value: float) -> str:
    """The power of ten next to a positive value.

    >>> power_of_ten(1e-12), power_of_ten(10)
    ('10⁻¹²', '10¹')
    """
    return "10" + str(round(math.log10(value))).translate(RAISED)


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the ending of the name decides the format."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    except ValueError as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def check_writable(path: Path, option: str = "--out") -> None:
    """Find out before hours of work, not after, that a picture cannot be written.

    Args:
        path: of the picture.
        option: of the command line, which named it.
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
            path.unlink(missing_ok=True)  # others may be trying the same
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}"
        raise UsageError(f"{reason}; choose another {option}") from None


def label(axes: Any, x: str, y: str, title: str = "") -> None:
    """Name the axes and the panel."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=11)


def entitle(figure: Figure, title: str) -> None:
    """The title above a whole figure, in as many lines as its width asks for."""
    figure.suptitle(fill(title, int(LETTERS_AN_INCH * figure.get_figwidth())), fontsize=12)


Curve = np.ndarray[Any, np.dtype[np.float64]]
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
    """Panels: the metric, the training loss where it is another one, the server step size.

    Mean and spread are over seeds and the last `smooth` rounds.
    """
    panels = list(dict.fromkeys([metric, "train_loss", "server_lr"]))
    figure, axes = new_figure(len(panels))
    for name, panel in zip(panels, axes, strict=True):
        for algorithm, curves in group_curves(outcomes, name).items():
            draw_band(panel, curves, algorithm, smooth)
        label(panel, "round", NAMES.get(name, name))
        if _spans_decades(outcomes, name):
            log_scale(panel)
    if target is not None:
        axes[0].axhline(target, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
    axes[0].legend(frameon=False, fontsize=9)
    entitle(figure, title)
    return figure


def group_curves(outcomes: Sequence[Outcome], name: str) -> dict[str, list[Curve]]:
    """The curves of each algorithm, one a seed."""
    groups: dict[str, list[Curve]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.spec.algorithm, []).append(outcome.curve(name))
    return groups


def mean_and_spread(curves: Sequence[Curve], smooth: int = 1) -> tuple[Curve, Curve, Curve]:
    """Rounds, mean and standard deviation; a diverged run ends the mean where it ended.

    Both are over all curves and, as in the paper's long runs (App. D.5), over a moving window of
    the last `smooth` rounds.

    >>> rounds, mean, spread = mean_and_spread([np.array([1.0, 2.0, 9.0]), np.array([3.0, 4.0])])
    >>> rounds.tolist(), mean.tolist()
    ([1.0, 2.0], [2.0, 3.0])
    """
    length = min(len(curve) for curve in curves)
    stacked = np.stack([curve[:length] for curve in curves])
    known = np.flatnonzero(~np.isnan(stacked).any(axis=0))
    windows = [stacked[:, max(0, at + 1 - smooth) : at + 1] for at in known]
    values = [window[~np.isnan(window)] for window in windows]
    mean = np.array([each.mean() for each in values], dtype=np.float64)
    spread = np.array([spread_of(each) or 0.0 for each in values], dtype=np.float64)
    return (known + 1).astype(np.float64), mean, spread


def draw_band(axes: Axes, curves: Sequence[Curve], algorithm: str, smooth: int = 1) -> None:
    """A line for the mean, a band for one standard deviation over seeds."""
    rounds, mean, spread = mean_and_spread(curves, smooth)
    if not len(rounds):
        return
    axes.plot(rounds, mean, color=colour(algorithm), linewidth=1.6, label=algorithm)
    if spread.any():
        low = np.maximum(mean - spread, np.nanmin([np.nanmin(curve) for curve in curves]))
        axes.fill_between(rounds, low, mean + spread, color=colour(algorithm), alpha=0.15, lw=0)


def _spans_decades(outcomes: Sequence[Outcome], name: str) -> bool:
    """A log scale helps where positive values differ by more than a hundred times."""
    if name.endswith("accuracy"):
        return False
    values = np.concatenate([outcome.curve(name) for outcome in outcomes] or [np.empty(0)])
    values = values[~np.isnan(values)]
    return bool(values.size and values.min() > 0 and values.max() / values.min() > 100)
