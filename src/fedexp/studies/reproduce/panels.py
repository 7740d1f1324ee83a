"""Figures of studies in the paper's layouts: a panel a task, or a row of panels a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.experiments.canvas import COLOURS, colour, entitle, label, log_scale, new_figure
from fedexp.experiments.figures import NAMES, mean_and_spread
from fedexp.experiments.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Groups = Mapping[str, Mapping[str, Sequence[Outcome]]]
# Settings of one algorithm, e.g. values of eps: dark to light, told apart in grey as well.
SHADES = ("#440154", "#3B528B", "#21918C", "#5EC962", "#E3A008")
UNSMOOTHED = ("synthetic",)  # nothing is random there, and the paper draws it as it is
ALL = ("test_accuracy", "train_loss", "train_accuracy", "server_lr")


def study_figure(
    groups: Groups,
    title: str,
    metrics: Sequence[str],
    *,
    targets: Mapping[str, float] | None = None,
    window: int = 1,
) -> Figure:
    """One row of panels a metric, one column a task; a single metric is the paper's Figure 3.

    Args:
        groups: outcomes by task and series, seed by seed.
        title: over all panels.
        metrics: fields of the records.
        targets: levels of the first metric, by task.
        window: rounds of the moving average.
    """
    tasks = list(groups)
    figure, axes = new_figure(len(tasks), rows=len(metrics))
    for row, metric in enumerate(metrics):
        for column, task in enumerate(tasks):
            panel = axes[row * len(tasks) + column]
            draw_panel(panel, groups[task], metric, 1 if task in UNSMOOTHED else window)
            label(panel, "round", NAMES.get(metric, metric), task if row == 0 else "")
            if targets and metric == metrics[0] and task in targets:
                panel.axhline(targets[task], color="#555555", linewidth=0.9, linestyle=":")
    _finish(figure, axes, title)
    return figure


def task_figure(groups: Groups, title: str, metrics: Sequence[str], **more: Any) -> Figure:
    """One task in a row of panels, one a metric, as the paper's Figures 8 to 11; else by task."""
    if len(groups) != 1:
        return study_figure(groups, title, metrics[:1], **more)
    ((task, series),) = groups.items()
    figure, axes = new_figure(len(metrics))
    for panel, metric in zip(axes, metrics, strict=True):
        draw_panel(panel, series, metric, more.get("window", 1))
        label(panel, "round", NAMES.get(metric, metric))
    if task in (targets := more.get("targets") or {}):
        axes[0].axhline(targets[task], color="#555555", linewidth=0.9, linestyle=":")
    _finish(figure, axes, f"{title}: {task}")
    return figure


def draw_panel(
    axes: Axes, series: Mapping[str, Sequence[Outcome]], metric: str, window: int = 1
) -> None:
    """A line for the mean of each series, a band for one standard deviation."""
    from matplotlib.ticker import MaxNLocator

    lowest, highest = np.inf, 0.0
    for name, shade in zip(series, shades(series), strict=True):
        rounds, mean, spread = mean_and_spread([o.curve(metric) for o in series[name]], window)
        if not len(rounds):
            continue
        dot = "o" if len(rounds) == 1 else None
        axes.plot(rounds, mean, color=shade, linewidth=1.5, marker=dot, label=name)
        if spread.any():
            least = 0.0 if metric.endswith("accuracy") else mean.min() / 2  # which has a logarithm
            low = np.maximum(mean - spread, least)
            axes.fill_between(rounds, low, mean + spread, color=shade, alpha=0.15, lw=0)
        lowest, highest = min(lowest, float(mean.min())), max(highest, float(mean.max()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not metric.endswith("accuracy") and 0 < 100 * lowest < highest:
        log_scale(axes)


def shades(series: Mapping[str, Any]) -> list[str]:
    """An algorithm's own colour; for settings of one algorithm, shades in their order."""
    if all(name in COLOURS for name in series):
        return [colour(name) for name in series]
    return [SHADES[k % len(SHADES)] for k in range(len(series))]


def _finish(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    drawn = [panel for panel in axes if panel.get_legend_handles_labels()[1]]
    for panel in axes:
        panel.set_visible(panel in drawn)  # a task may lack a metric
    if drawn:
        fullest = max(drawn, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
        fullest.legend(frameon=False, fontsize=8)
    entitle(figure, title)
