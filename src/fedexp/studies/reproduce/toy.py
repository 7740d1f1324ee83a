"""The paper's Figure 2: the distance falls every round while the loss oscillates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fedexp.experiments.canvas import entitle
from fedexp.experiments.toy import LAST, MEAN, PLAIN, Path, toy_figure, toy_paths
from fedexp.studies.published import Value, claim
from fedexp.studies.reproduce.lines import Column, Line, Table
from fedexp.studies.reproduce.output import figure_title
from fedexp.studies.reproduce.study import Check, Findings, Plan, Result, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START = (0.0, 0.0)
ON_FIRST_LINE = (1.0, 0.0)  # a point of S1
DISTANCE, LOSS = "squared distance", "loss"
FURTHER, HIGHER = "rounds the distance grows in", "rounds the loss grows in"
COLUMNS = (
    Column(DISTANCE, ""),
    Column(LOSS, ""),
    Column(FURTHER, "rounds"),
    Column(HIGHER, "rounds"),
)


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Trace the iterates, which records do not keep; it takes no time."""
    paths = toy_paths(START, plan.rounds)
    lines = tuple(_line(name, path) for name, path in paths.items())
    return Findings(Table(COLUMNS, lines, "iterate"), _checks(paths), lambda: _draw(plan, paths))


def rises(values: Sequence[float]) -> int:
    """How often the next value is greater.

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


def _checks(paths: Mapping[str, Path]) -> tuple[Check, ...]:
    last, mean, plain = paths[LAST], paths[MEAN], paths[PLAIN]
    rounds = len(last.loss) - 1
    up, away = rises(last.loss), rises(last.sq_distance)
    lower = sum(a < b for a, b in zip(mean.loss[1:], last.loss[1:], strict=True))
    gain = float(np.mean(last.loss[1:])) / float(np.mean(mean.loss[1:]))
    near, far = last.sq_distance[-1], plain.sq_distance[-1]
    s1, s2 = line_distances(START)
    return (
        _check("start", s1 < s2, f"{s1:.2f} and {s2:.2f}"),
        _check("distance", away == 0, f"{rounds - away} of {rounds} rounds"),
        _check("oscillation", up > 0, f"rises in {up} of {rounds} rounds"),
        _check("turns", *_turns(last)),
        _check("mean", gain > 1, f"{gain:.2f} times lower; in {lower} of {rounds} rounds"),
        _check("faster", near < far, f"squared distance {near:.2g}, FedAvg {far:.2g}"),
        _check("two", *_from_first_line()),
    )


def line_distances(point: Sequence[float]) -> tuple[float, float]:
    """Distances of a point to S1: 3a + b = 3 and to S2: a + b = 3."""
    a, b = point
    return abs(3 * a + b - 3) / 10**0.5, abs(a + b - 3) / 2**0.5


def _turns(path: Path) -> tuple[bool, str]:
    """Whether the nearer line is another one after every step."""
    nearer = [int(np.argmin(line_distances(point))) for point in path.points.tolist()]
    changes = sum(a != b for a, b in pairwise(nearer))
    return changes == len(nearer) - 1, f"{changes} of {len(nearer) - 1} rounds"


def _from_first_line() -> tuple[bool, str]:
    path = toy_paths(ON_FIRST_LINE, 1)[LAST]
    step, off = path.steps[0], line_distances(path.points[1].tolist())[1]
    return abs(step - 2) < 1e-9 and off < 1e-9, f"step {step:.6g}, {off:.1g} from S2"


def _check(key: str, holds: bool, seen: str) -> Check:
    return Check(claim("toy", key), bool(holds), seen)


def _draw(plan: Plan, paths: Mapping[str, Path]) -> Figure:
    figure = toy_figure(paths)
    entitle(figure, figure_title(plan))
    return figure


STUDY = Study(
    name="toy",
    title="Figure 2: FedAvg and FedExP on the toy problem in two dimensions",
    needs="seconds on a CPU",
    rounds=30,
    seeds={"toy": 1},
    arms=lambda task: (),
    measure=measure,
    small_rounds=30,
    remarks=(
        "the paper states neither the start nor the number of rounds; (0, 0) and 30 are taken here",
    ),
)
