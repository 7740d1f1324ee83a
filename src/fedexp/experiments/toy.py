"""The paper's Figure 2: why extrapolation helps, in two dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedexp.algorithms import Algorithm, fedavg, fedexp
from fedexp.engine import simulate
from fedexp.experiments.canvas import colour, label, new_figure
from fedexp.tasks import toy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPTIMUM = torch.tensor([0.0, 3.0], dtype=torch.float64)
LAST, MEAN, PLAIN = "FedExP, last iterate", "FedExP, mean of the last two", "FedAvg"
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": colour("fedavg"), "marker": "o"},
    LAST: {"color": colour("fedexp"), "marker": "s"},
    MEAN: {"color": "#009E73", "marker": "^"},
}


@dataclass(frozen=True, eq=False)
class Path:
    """Iterates w⁰, w¹, ... with their loss and their distance to the optimum."""

    points: Tensor
    loss: list[float]
    steps: list[float]

    @property
    def sq_distance(self) -> list[float]:
        return (self.points - OPTIMUM).square().sum(dim=1).tolist()


def toy_paths(start: tuple[float, float], rounds: int) -> Mapping[str, Path]:
    """FedAvg and FedExP on the toy problem, with exact projections (factor 1, eps 0)."""
    exact = fedexp(eps=0.0, factor=1.0)
    return {
        PLAIN: _path(fedavg(), start, rounds, averaged=False),
        LAST: _path(exact, start, rounds, averaged=False),
        MEAN: _path(exact, start, rounds, averaged=True),
    }


def _path(algorithm: Algorithm, start: tuple[float, float], rounds: int, averaged: bool) -> Path:
    task = toy(start)
    first, buffers = task.objective.initial(0)
    points, steps = [first], []
    for record in simulate(task, algorithm, rounds):
        points.append(record.state.output()[0] if averaged else record.state.params)
        steps.append(record.server_lr or 1.0)
    losses = [task.evaluate(w, buffers)["train_loss"] for w in points]
    return Path(torch.stack(points), losses, steps)


def toy_figure(paths: Mapping[str, Path]) -> Figure:
    """Three panels: trajectories with both solution lines, squared distance, loss."""
    figure, (plane, distance, loss) = new_figure(3)
    _draw_plane(plane, paths)
    for name, path in paths.items():
        small = {"markersize": 3, "linewidth": 1.3, "label": name, **STYLES[name]}
        distance.semilogy(path.sq_distance, **small)
        loss.semilogy(path.loss, **small)
    label(distance, "round", r"$\|w - w^*\|^2$", "distance to the optimum")
    label(loss, "round", r"$F(w)$", "loss")
    distance.legend(frameon=False, fontsize=8)
    return figure


def _draw_plane(axes: Axes, paths: Mapping[str, Path]) -> None:
    every = torch.cat([path.points for path in paths.values()])
    low, high = (every.min(dim=0).values - 0.35).tolist(), (every.max(dim=0).values + 0.35).tolist()
    ends = torch.tensor([low[0], high[0]])
    axes.plot(ends, 3 - 3 * ends, color="#666666", linewidth=1.2)
    axes.plot(ends, 3 - ends, color="#666666", linewidth=1.2, linestyle="--")
    for name, path in paths.items():
        x, y = path.points.T
        axes.plot(x, y, markersize=3.5, linewidth=1.1, alpha=0.9, label=name, **STYLES[name])
    axes.plot(*OPTIMUM, marker="*", color="black", markersize=13, linestyle="none", zorder=5)
    axes.annotate(
        "optimum", tuple(OPTIMUM.tolist()), (8, 6), textcoords="offset points", fontsize=9
    )
    axes.annotate(
        "start", tuple(every[0].tolist()), (6, -12), textcoords="offset points", fontsize=9
    )
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    _name_line(axes, "$S_1$: $3w_1 + w_2 = 3$", 3.0, low[1] + 0.1 * (high[1] - low[1]))
    _name_line(axes, "$S_2$: $w_1 + w_2 = 3$", 1.0, low[1] + 0.68 * (high[1] - low[1]))
    label(axes, "$w_1$", "$w_2$", "trajectories")


def _name_line(axes: Axes, text: str, slope: float, height: float) -> None:
    """Write the name of the solution line slope * w1 + w2 = 3 to its right."""
    place: dict[str, Any] = {"ha": "left", "va": "bottom", "fontsize": 9, "color": "#444444"}
    point = ((3 - height) / slope, height)
    axes.annotate(text, point, (5, 1), textcoords="offset points", **place)
