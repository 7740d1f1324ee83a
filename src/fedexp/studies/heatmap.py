"""The heat-map of Figure 1: what every pair of values comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.experiments.canvas import entitle, new_figure
from fedexp.experiments.figures import NAMES
from fedexp.experiments.spec import is_better_higher
from fedexp.experiments.tables import format_value
from fedexp.studies.ledger import Tried
from fedexp.studies.trial import window_of
from fedexp.studies.tune import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = np.ndarray[Any, np.dtype[np.float64]]
SYMBOLS = {
    "local.lr": r"client step size $\eta_l$",
    "server.lr": r"server step size $\eta_g$",
    "server.eps": r"$\epsilon$",
    "client.mu": r"$\mu$",
    "server.tau": r"$\tau$",
}
DIVERGED = "#BBBBBB"
SPAN = 1e4  # of the losses that have colours of their own


def tuning_figure(study: Study, tried: Sequence[Tried]) -> Figure:
    """The score of every trial, and beside it the test accuracy, as Figure 1 shows it.

    A grid is drawn as a heat-map, a free search as points. The search has two dimensions, and the
    best trial comes first: it is framed in both, though only the score chose it.
    """
    (down, across), spec = _axes_of(study), study.run.spec
    tests = any(each.scored.test is not None for each in tried)
    figure, panels = new_figure(2 if tests else 1, width=5.2, height=4.2)
    first, last = window_of(study.run.rounds)
    _panel(study, tried, panels[0], "score", study.metric)
    panels[0].set_title(f"{NAMES[study.metric]}, rounds {first} to {last}", fontsize=11)
    if tests:
        metric = study.metric.replace("train", "test")
        _panel(study, tried, panels[1], "test", metric)
        panels[1].set_title(f"{NAMES[metric]} after {last} rounds", fontsize=11)
    for each in panels:
        each.set_xlabel(SYMBOLS.get(across, across))
        each.set_ylabel(SYMBOLS.get(down, down))
    entitle(figure, f"{spec.algorithm} on {spec.task}")
    return figure


def draw_heatmap(
    axes: Axes,
    across: Sequence[float],
    down: Sequence[float],
    cells: Cells,
    metric: str,
    frame: tuple[int, int] | None = None,
) -> None:
    """A table in colours, small values at the bottom left; NaN is drawn grey.

    Args:
        axes: where to draw.
        across: the values along the horizontal axis.
        down: the values along the vertical axis.
        cells: one number for each pair, shape [down, across].
        metric: what the numbers are; accuracies are shown in percent, losses on a log scale.
        frame: row and column of the cell that was chosen.
    """
    from matplotlib.patches import Rectangle

    colours = _colours(cells, metric)
    axes.grid(False)
    axes.set_facecolor(DIVERGED)
    axes.imshow(cells, origin="lower", aspect="auto", **colours)
    axes.set_xticks(range(len(across)), [f"{value:.3g}" for value in across])
    axes.set_yticks(range(len(down)), [f"{value:.3g}" for value in down])
    dark = _is_dark(cells, colours)
    for (row, column), value in np.ndenumerate(cells):
        ink = "white" if dark[row, column] else "black"
        axes.text(column, row, _short(value, metric), ha="center", va="center", color=ink)
    if frame is not None:
        corner = (frame[1] - 0.5, frame[0] - 0.5)
        box = Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=3, clip_on=False)
        axes.add_patch(box)


def _panel(study: Study, tried: Sequence[Tried], axes: Axes, field: str, metric: str) -> None:
    down, across = _axes_of(study)
    value = {(each.point[down], each.point[across]): _value(each, field) for each in tried}
    if study.protocol == "free":
        _scatter(axes, value, metric)
        return
    rows, columns = sorted(study.values[down]), sorted(study.values[across])
    cells = np.array([[value.get((y, x), np.nan) for x in columns] for y in rows])
    best = tried[0].point
    chosen = (rows.index(best[down]), columns.index(best[across]))
    draw_heatmap(axes, columns, rows, cells, metric, chosen)


def _scatter(axes: Axes, value: dict[tuple[float, float], float], metric: str) -> None:
    """Points on log scales; those that diverged or were given up are crosses."""
    known = {at: number for at, number in value.items() if np.isfinite(number)}
    given_up = [at for at in value if at not in known]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.scatter([x for _, x in given_up], [y for y, _ in given_up], c=DIVERGED, marker="x")
    if not known:
        return
    numbers = np.array(list(known.values()))
    x, y = [at[1] for at in known], [at[0] for at in known]
    drawn = axes.scatter(x, y, c=numbers, s=60, edgecolors="#555555", **_colours(numbers, metric))
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes)


def _axes_of(study: Study) -> tuple[str, str]:
    """Which option goes up and which goes across: the clients' step size goes across."""
    first, second = study.values
    return (second, first) if first == "local.lr" else (first, second)


def _value(tried: Tried, field: str) -> float:
    value = getattr(tried.scored, field)
    lost = tried.scored.diverged_at is not None or tried.scored.pruned
    return float("nan") if lost or value is None else float(value)


def _colours(cells: Cells, metric: str) -> dict[str, Any]:
    from matplotlib.colors import LogNorm, Normalize

    known = cells[np.isfinite(cells)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    if is_better_higher(metric):
        return {"cmap": "viridis", "norm": Normalize(low, high)}
    # a loss on its way to infinity would leave one colour for all the others
    scale = LogNorm(low, min(high, SPAN * low)) if low > 0 else Normalize(low, high)
    return {"cmap": "viridis_r", "norm": scale}


def _is_dark(cells: Cells, colours: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where the ink has to be white."""
    from matplotlib import colormaps

    known = np.where(np.isfinite(cells), cells, colours["norm"].vmin)
    red, green, blue, _ = np.moveaxis(colormaps[colours["cmap"]](colours["norm"](known)), -1, 0)
    return np.asarray((0.3 * red + 0.6 * green + 0.1 * blue < 0.5) & np.isfinite(cells))


def _short(value: float, metric: str) -> str:
    if not np.isfinite(value):
        return "div."
    return f"{100 * value:.1f}" if is_better_higher(metric) else format_value(value, metric)
