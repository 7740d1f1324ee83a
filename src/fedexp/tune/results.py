"""The outcome of a search for people and programs: tables, the next command, plain values.

The heat-map of Figure 1: what every pair of values comes to.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.plots import NAMES, entitle, new_figure
from fedexp.analysis.tables import format_value
from fedexp.runs.spec import is_better_higher
from fedexp.tune.epsilon import EPS, Found
from fedexp.tune.grids import Point
from fedexp.tune.ledger import Tried
from fedexp.tune.search import Study
from fedexp.tune.trial import Scored, window_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP = 10
Table = tuple[list[str], list[list[str]]]


def best_table(studies: Sequence[tuple[Study, list[Tried]]], exact: bool = False) -> Table:
    """The best values of each algorithm; of a single one, its ten best points, or all if exact.

    `exact` is for programs: numbers in full, and nothing where there is none.
    """
    metric = studies[0][0].metric
    single = len(studies) == 1
    names = list(dict.fromkeys(name for study, _ in studies for name in study.values))
    test = metric.replace("train", "test")
    cells = []
    for study, tried in studies:
        for each in tried[: (len(tried) if exact else TOP) if single else 1]:
            turned = [_number(each.point.get(name), exact) for name in names]
            results = [_result(each.scored, metric, exact), _test(each.scored, test, exact)]
            cells.append([study.run.spec.algorithm, *turned, *results])
    return _without_empty(["algorithm", *names, _words(metric), f"last {_words(test)}"], cells)


def epsilon_table(study: Study, found: Found, exact: bool = False) -> Table:
    """The values that the rule of thumb went through."""
    test = study.metric.replace("train", "test")
    results = [_words(study.metric), f"last {_words(test)}"]
    cells = [
        [
            _number(eps, exact),
            _result(each, study.metric, exact),
            _test(each, test, exact),
            _number(each.step, exact),
        ]
        for eps, each in found.tried
    ]
    return _without_empty(["eps", *results, "median step size"], cells)


def heading(study: Study, count: int) -> str:
    """What was searched, and what the score is."""
    spec = study.run.spec
    first, last = window_of(study.run.rounds)
    kinds = {"paper": "grid", "free": "free search", "epsilon": "rule of thumb"}
    trials = f"{count} {'trial' if count == 1 else 'trials'} of {last} rounds, seed {spec.seed}"
    score = f"{study.metric.replace('train_', 'training ')}, mean of rounds {first} to {last}"
    return f"{spec.task}: {kinds[study.protocol]}, {trials}; score: {score}"


def next_command(study: Study, point: Point) -> str:
    """The command that trains with these values; the rounds are those of the task."""
    spec = study.run.spec
    words = ["fedexp", "run", spec.task, "--algorithm", spec.algorithm]
    for flag, value, usual in (("--mode", spec.mode, "paper"), ("--seed", str(spec.seed), "0")):
        words += [flag, value] if value != usual else []
    pairs = {**dict(spec.options), **{name: _exact(value) for name, value in point.items()}}
    for name, value in pairs.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def remarks(study: Study, tried: Sequence[Tried]) -> list[str]:
    """What a reader of the best values should know: how many failed, and where the grid ends."""
    diverged = sum(each.scored.diverged_at is not None for each in tried)
    pruned = sum(each.scored.pruned for each in tried)
    lines = [f"{diverged} of {len(tried)} trials diverged"] if diverged else []
    lines += [f"{pruned} of {len(tried)} trials were given up early"] if pruned else []
    for name, value in tried[0].point.items():
        ends = study.values[name]
        if study.protocol == "paper" and len(ends) > 1 and value in (min(ends), max(ends)):
            side = "smallest" if value == min(ends) else "largest"
            lines.append(f"{name}={_number(value)} is the {side} of the grid; look beyond it")
    return lines


def as_json(study: Study, tried: Sequence[Tried], best: Point) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "algorithm": study.run.spec.algorithm,
        "best": best,
        "next": next_command(study, best),
        "trials": [{"values": each.point, **_plain(each.scored)} for each in tried],
    }


def epsilon_trials(found: Found) -> list[Tried]:
    """What the rule of thumb tried, as points."""
    return [Tried({EPS: eps}, scored) for eps, scored in found.tried]


def _without_empty(headers: list[str], cells: list[list[str]]) -> Table:
    """A task without test data needs no column for it."""
    kept = [k for k in range(len(headers)) if any(row[k] != "-" for row in cells)]
    return [headers[k] for k in kept], [[row[k] for k in kept] for row in cells]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plain(scored: Scored) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in vars(scored).items()}  # fmt: skip


def _result(scored: Scored, metric: str, exact: bool) -> str:
    if scored.diverged_at is not None or scored.pruned:
        return "" if exact else "given up" if scored.pruned else "diverged"
    return _exact(scored.score) if exact else format_value(scored.score, metric)


def _test(scored: Scored, metric: str, exact: bool) -> str:
    if scored.test is None or scored.diverged_at is not None:
        return "-"
    return _exact(scored.test) if exact else format_value(scored.test, metric)


def _number(value: float | None, exact: bool = False) -> str:
    return "" if value is None else _exact(value) if exact else f"{value:.3g}"


def _exact(value: float) -> str:
    """As short as it can be said without becoming another number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


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
