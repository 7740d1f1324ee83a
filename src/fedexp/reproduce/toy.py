"""Figure 2: FedAvg and FedExP on two linear equations in two unknowns.

FedExP's distance to the optimum falls in every round while its loss oscillates; the mean of the
last two iterates has the lower loss. `fedexp toy` draws the trajectories, and the study `toy`
checks the paper's statements about them. Settings: docs/paper.md#toy-problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import Algorithm, fedavg, fedexp
from fedexp.analysis.plots import colour, entitle, label, new_figure
from fedexp.experiment import simulate
from fedexp.reproduce.output import figure_title
from fedexp.reproduce.published import Column, Line, Table, Value, study_fields
from fedexp.reproduce.study import Check, Findings, Plan, Result, Study, check
from fedexp.tasks import toy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

START = (0.0, 0.0)
ON_FIRST_LINE = (1.0, 0.0)  # a point of S1
OPTIMUM = torch.tensor([0.0, 3.0], dtype=torch.float64)
LAST, MEAN, PLAIN = "FedExP, last iterate", "FedExP, mean of the last two", "FedAvg"
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": colour("fedavg"), "marker": "o"},
    LAST: {"color": colour("fedexp"), "marker": "s"},
    MEAN: {"color": "#009E73", "marker": "^"},
}


@dataclass(frozen=True, eq=False)
class Path:
    """Iterates w⁰, w¹, ... of shape (rounds + 1, 2), their losses, and the server step sizes."""

    points: Tensor
    loss: list[float]
    steps: list[float]

    @property
    def sq_distance(self) -> list[float]:
        """The squared distance of each iterate to the optimum."""
        return (self.points - OPTIMUM).square().sum(dim=1).tolist()


def toy_paths(start: tuple[float, float], rounds: int) -> Mapping[str, Path]:
    """Run FedAvg and FedExP with exact projections (docs/paper.md#exact-projection-step)."""
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
    """Draw trajectories with both solution lines, squared distance, and loss."""
    # Legible in a column of text.
    figure, (plane, distance, loss) = new_figure(3, width=3.3, height=3.4)
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
    points = torch.cat([path.points for path in paths.values()])
    low, high = (points.amin(dim=0) - 0.35).tolist(), (points.amax(dim=0) + 0.35).tolist()
    ends = torch.tensor([low[0], high[0]])
    axes.plot(ends, 3 - 3 * ends, color="#666666", linewidth=1.2)
    axes.plot(ends, 3 - ends, color="#666666", linewidth=1.2, linestyle="--")
    for name, path in paths.items():
        x, y = path.points.T
        axes.plot(x, y, markersize=3.5, linewidth=1.1, alpha=0.9, label=name, **STYLES[name])
    axes.plot(*OPTIMUM, marker="*", color="black", markersize=13, linestyle="none", zorder=5)
    for name, point, offset in (("optimum", OPTIMUM, (8, 6)), ("start", points[0], (6, -12))):
        axes.annotate(name, tuple(point.tolist()), offset, textcoords="offset points", fontsize=9)
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    _name_line(axes, "$S_1$: $3w_1 + w_2 = 3$", 3.0, low[1] + 0.1 * (high[1] - low[1]))
    _name_line(axes, "$S_2$: $w_1 + w_2 = 3$", 1.0, low[1] + 0.68 * (high[1] - low[1]))
    label(axes, "$w_1$", "$w_2$", "trajectories")


def _name_line(axes: Axes, text: str, slope: float, height: float) -> None:
    """Label the solution line slope * w1 + w2 = 3 on its right."""
    place: dict[str, Any] = {"ha": "left", "va": "bottom", "fontsize": 9, "color": "#444444"}
    point = ((3 - height) / slope, height)
    axes.annotate(text, point, (5, 1), textcoords="offset points", **place)


DISTANCE, LOSS = "squared distance", "loss"
FURTHER, HIGHER = "rounds the distance grows in", "rounds the loss grows in"
judge = partial(check, "toy")
COLUMNS = (
    Column(DISTANCE, ""),
    Column(LOSS, ""),
    Column(FURTHER, "rounds"),
    Column(HIGHER, "rounds"),
)


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Trace the iterates anew: records do not hold them, and it takes no time."""
    paths = toy_paths(START, plan.rounds)
    lines = tuple(_line(name, path) for name, path in paths.items())
    return Findings(Table(COLUMNS, lines, "iterate"), toy_checks(paths), lambda: _draw(plan, paths))


def rises(values: Sequence[float]) -> int:
    """Return how often the next value is greater.

    >>> rises([3, 2, 4, 1])
    1
    """
    return int((np.diff(values) > 0).sum())


def _line(name: str, path: Path) -> Line:
    values = {
        DISTANCE: Value(path.sq_distance[-1]),
        LOSS: Value(path.loss[-1]),
        FURTHER: Value(rises(path.sq_distance)),
        HIGHER: Value(rises(path.loss)),
    }
    return Line("toy", name, values)


def toy_checks(paths: Mapping[str, Path]) -> tuple[Check, ...]:
    last, mean, plain = paths[LAST], paths[MEAN], paths[PLAIN]
    rounds = len(last.loss) - 1
    up, away = rises(last.loss), rises(last.sq_distance)
    lower = sum(a < b for a, b in zip(mean.loss[1:], last.loss[1:], strict=True))
    gain = float(np.mean(last.loss[1:])) / float(np.mean(mean.loss[1:]))
    near, far = last.sq_distance[-1], plain.sq_distance[-1]
    s1, s2 = line_distances(START)
    return (
        judge("start", s1 < s2, f"{s1:.2f} and {s2:.2f}"),
        judge("distance", away == 0, f"{rounds - away} of {rounds} rounds"),
        judge("oscillation", up > 0, f"rises in {up} of {rounds} rounds"),
        judge("turns", *_turns(last)),
        judge("mean", gain > 1, f"{gain:.2f} times lower; in {lower} of {rounds} rounds"),
        judge("faster", near < far, f"squared distance {near:.2g}, FedAvg {far:.2g}"),
        judge("two", *_from_first_line()),
    )


def line_distances(point: Sequence[float]) -> tuple[float, float]:
    """Return the distances of a point to S1: 3a + b = 3 and to S2: a + b = 3."""
    a, b = point
    return abs(3 * a + b - 3) / 10**0.5, abs(a + b - 3) / 2**0.5


def _turns(path: Path) -> tuple[bool, str]:
    """Test whether the nearer line alternates in every round."""
    nearer = [int(np.argmin(line_distances(point))) for point in path.points.tolist()]
    changes = sum(a != b for a, b in pairwise(nearer))
    return changes == len(nearer) - 1, f"{changes} of {len(nearer) - 1} rounds"


def _from_first_line() -> tuple[bool, str]:
    """Test the first step from a point of S1: size 2, and on S2."""
    path = toy_paths(ON_FIRST_LINE, 1)[LAST]
    step, off = path.steps[0], line_distances(path.points[1].tolist())[1]
    return abs(step - 2) < 1e-9 and off < 1e-9, f"step {step:.6g}, {off:.1g} from S2"


def _draw(plan: Plan, paths: Mapping[str, Path]) -> Figure:
    figure = toy_figure(paths)
    entitle(figure, figure_title(plan))
    return figure


STUDY = Study(**study_fields("toy"), arms=lambda task: (), measure=measure)
