"""The results of a search: tables, JSON, the command to run next, and the heat map of Figure 1."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.analysis.plots import NAMES, entitle, new_figure
from fedexp.analysis.tables import format_value
from fedexp.tuning.grids import Point
from fedexp.tuning.search import EPS, EpsilonResult, Study, window_of
from fedexp.tuning.store import Trial, TrialResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table = tuple[list[str], list[list[str]]]
Cells = np.ndarray[Any, np.dtype[np.float64]]
TOP = 10  # trials in the table of a single algorithm
SYMBOLS = {
    "local.lr": r"client step size $\eta_l$",
    "server.lr": r"server step size $\eta_g$",
    "server.eps": r"$\epsilon$",
    "client.mu": r"$\mu$",
    "server.tau": r"$\tau$",
}
DIVERGED = "#BBBBBB"
SPAN = 1e4  # ratio of the largest to the smallest loss on the colour scale


def best_table(studies: Sequence[tuple[Study, list[Trial]]], exact: bool = False) -> Table:
    """Return the best values of each algorithm; of a single one, its ten best, or all if exact.

    Args:
        studies: each study and its trials, best first.
        exact: write numbers in full, for programs, and empty cells for failed trials.
    """
    metric = studies[0][0].metric
    single = len(studies) == 1
    names = list(dict.fromkeys(name for study, _ in studies for name in study.values))
    test = metric.replace("train", "test")
    cells = []
    for study, trials in studies:
        for each in trials[: (len(trials) if exact else TOP) if single else 1]:
            point = [_number(each.point.get(name), exact) for name in names]
            results = [_result(each.result, metric, exact), _test(each.result, test, exact)]
            cells.append([study.run.spec.algorithm, *point, *results])
    return _without_empty(["algorithm", *names, _words(metric), f"last {_words(test)}"], cells)


def epsilon_table(study: Study, found: EpsilonResult, exact: bool = False) -> Table:
    """Return the values that the rule of thumb tried."""
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
    """Return one line: what was searched, and what the score is."""
    spec = study.run.spec
    first, last = window_of(study.run.rounds)
    kinds = {"paper": "grid", "free": "free search", "epsilon": "rule of thumb"}
    trials = f"{count} {'trial' if count == 1 else 'trials'} of {last} rounds, seed {spec.seed}"
    score = f"{study.metric.replace('train_', 'training ')}, mean of rounds {first} to {last}"
    return f"{spec.task}: {kinds[study.protocol]}, {trials}; score: {score}"


def next_command(study: Study, point: Point) -> str:
    """Return the command that trains with these values, for the task's own number of rounds."""
    spec = study.run.spec
    task, algorithm = spec.task_source or spec.task, spec.algorithm_source or spec.algorithm
    words = ["fedexp", "run", task, "--algorithm", algorithm]
    for flag, value, usual in (("--mode", spec.mode, "paper"), ("--seed", str(spec.seed), "0")):
        words += [flag, value] if value != usual else []
    pairs = {**dict(spec.options), **{name: _exact(value) for name, value in point.items()}}
    for name, value in pairs.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def remarks(study: Study, trials: Sequence[Trial]) -> list[str]:
    """Return notes on the best values: how many trials failed, and whether the grid ends there."""
    diverged = sum(each.result.diverged_at is not None for each in trials)
    pruned = sum(each.result.pruned for each in trials)
    lines = [f"{diverged} of {len(trials)} trials diverged"] if diverged else []
    lines += [f"{pruned} of {len(trials)} trials were pruned"] if pruned else []
    for name, value in trials[0].point.items():
        ends = study.values[name]
        if study.protocol == "paper" and len(ends) > 1 and value in (min(ends), max(ends)):
            side = "smallest" if value == min(ends) else "largest"
            lines.append(f"{name}={_number(value)} is the {side} of the grid; look beyond it")
    return lines


def as_json(study: Study, trials: Sequence[Trial], best: Point) -> dict[str, Any]:
    """Return everything as plain values."""
    return {
        "algorithm": study.run.spec.algorithm,
        "best": best,
        "next": next_command(study, best),
        "trials": [{"values": each.point, **_plain(each.result)} for each in trials],
    }


def epsilon_trials(found: EpsilonResult) -> list[Trial]:
    """Return the trials of the rule of thumb."""
    return [Trial({EPS: eps}, result) for eps, result in found.tried]


def _without_empty(headers: list[str], cells: list[list[str]]) -> Table:
    """Return the table without empty columns: a task may have no test data."""
    filled = [k for k in range(len(headers)) if any(row[k] != "-" for row in cells)]
    return [headers[k] for k in filled], [[row[k] for k in filled] for row in cells]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plain(result: TrialResult) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in vars(result).items()}  # fmt: skip


def _result(result: TrialResult, metric: str, exact: bool) -> str:
    if result.diverged_at is not None or result.pruned:
        return "" if exact else "pruned" if result.pruned else "diverged"
    return _exact(result.score) if exact else format_value(result.score, metric)


def _test(result: TrialResult, metric: str, exact: bool) -> str:
    if result.test is None or result.diverged_at is not None:
        return "-"
    return _exact(result.test) if exact else format_value(result.test, metric)


def _number(value: float | None, exact: bool = False) -> str:
    return "" if value is None else _exact(value) if exact else f"{value:.3g}"


def _exact(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def tuning_figure(study: Study, trials: Sequence[Trial]) -> Figure:
    """Draw the score of every trial, and the test accuracy beside it, as in Figure 1.

    A grid is drawn as a heat map, a free search as a scatter plot. The study has two options, and
    `trials` are sorted: the best, which only the score decides, is framed in both panels.
    """
    (down, across), spec = _axes_of(study), study.run.spec
    tests = study.metric.startswith("train_") and any(
        each.result.test is not None for each in trials
    )
    figure, panels = new_figure(2 if tests else 1, width=5.2, height=4.2)
    first, last = window_of(study.run.rounds)
    _panel(study, trials, panels[0], "score", study.metric)
    panels[0].set_title(
        f"{NAMES.get(study.metric, _words(study.metric))}, rounds {first} to {last}", fontsize=11
    )
    if tests:
        metric = study.metric.replace("train", "test")
        _panel(study, trials, panels[1], "test", metric)
        panels[1].set_title(f"{NAMES.get(metric, _words(metric))} after {last} rounds", fontsize=11)
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
    higher: bool | None = None,
) -> None:
    """Draw a heat map with small values at the bottom left; NaN is grey.

    Args:
        axes: where to draw.
        across: values along the horizontal axis.
        down: values along the vertical axis.
        cells: one number per pair, shape [down, across].
        metric: name of the metric; accuracies are shown in percent, losses on a log scale.
        frame: row and column of the cell to frame.
        higher: whether larger values are better; None for accuracies only.
    """
    from matplotlib.patches import Rectangle

    colours = _colours(cells, _rises(metric, higher))
    axes.grid(False)
    axes.set_facecolor(DIVERGED)
    axes.imshow(cells, origin="lower", aspect="auto", **colours)
    axes.set_xticks(range(len(across)), [f"{value:.3g}" for value in across])
    axes.set_yticks(range(len(down)), [f"{value:.3g}" for value in down])
    dark = _is_dark(cells, colours)
    for (row, column), value in np.ndenumerate(cells):
        colour = "white" if dark[row, column] else "black"
        axes.text(column, row, _short(value, metric), ha="center", va="center", color=colour)
    if frame is not None:
        corner = (frame[1] - 0.5, frame[0] - 0.5)
        box = Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=3, clip_on=False)
        axes.add_patch(box)


def _panel(study: Study, trials: Sequence[Trial], axes: Axes, field: str, metric: str) -> None:
    down, across = _axes_of(study)
    value = {(each.point[down], each.point[across]): _value(each, field) for each in trials}
    if study.protocol == "free":
        _scatter(axes, value, study.goal.higher)
        return
    rows, columns = sorted(study.values[down]), sorted(study.values[across])
    cells = np.array([[value.get((y, x), np.nan) for x in columns] for y in rows])
    best = trials[0].point
    chosen = (rows.index(best[down]), columns.index(best[across]))
    draw_heatmap(axes, columns, rows, cells, metric, chosen, study.goal.higher)


def _scatter(axes: Axes, value: dict[tuple[float, float], float], higher: bool) -> None:
    """Draw points on log scales; trials that diverged or were pruned are crosses."""
    known = {at: number for at, number in value.items() if np.isfinite(number)}
    failed = [at for at in value if at not in known]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.scatter([x for _, x in failed], [y for y, _ in failed], c=DIVERGED, marker="x")
    if not known:
        return
    numbers = np.array(list(known.values()))
    x, y = [at[1] for at in known], [at[0] for at in known]
    drawn = axes.scatter(x, y, c=numbers, s=60, edgecolors="#555555", **_colours(numbers, higher))
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes)


def _axes_of(study: Study) -> tuple[str, str]:
    """Return the options of the vertical and the horizontal axis; `local.lr` is horizontal."""
    first, second = study.values
    return (second, first) if first == "local.lr" else (first, second)


def _value(trial: Trial, field: str) -> float:
    value = getattr(trial.result, field)
    failed = trial.result.diverged_at is not None or trial.result.pruned
    return float("nan") if failed or value is None else float(value)


def _rises(metric: str, higher: bool | None) -> bool:
    return metric.endswith("accuracy") if higher is None else higher


def _colours(cells: Cells, higher: bool) -> dict[str, Any]:
    from matplotlib.colors import LogNorm, Normalize

    known = cells[np.isfinite(cells)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    if higher:
        return {"cmap": "viridis", "norm": Normalize(low, high)}
    # a loss close to divergence would leave one colour for all others
    scale = LogNorm(low, min(high, SPAN * low)) if low > 0 else Normalize(low, high)
    return {"cmap": "viridis_r", "norm": scale}


def _is_dark(cells: Cells, colours: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return where text has to be white."""
    from matplotlib import colormaps

    known = np.where(np.isfinite(cells), cells, colours["norm"].vmin)
    red, green, blue, _ = np.moveaxis(colormaps[colours["cmap"]](colours["norm"](known)), -1, 0)
    return np.asarray((0.3 * red + 0.6 * green + 0.1 * blue < 0.5) & np.isfinite(cells))


def _short(value: float, metric: str) -> str:
    if not np.isfinite(value):
        return "div."
    percent = metric.endswith("accuracy")
    return f"{100 * value:.1f}" if percent else format_value(value, metric)
