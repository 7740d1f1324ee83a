"""How every figure looks, and how it reaches the disk."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from fedexp.errors import UsageError

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
