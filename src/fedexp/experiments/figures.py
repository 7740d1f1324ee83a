"""The figure of a comparison: mean and spread over seeds, and the server step size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.experiments.canvas import colour, entitle, label, log_scale, new_figure
from fedexp.experiments.compare import spread_of
from fedexp.experiments.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
