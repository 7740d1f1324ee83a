"""The results of a search: tables, JSON, the command to run next, and the heat map of Figure 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.algorithms import Algorithm
from fedexp.analysis.plots import check_writable, entitle, label, metric_title, new_figure, save
from fedexp.analysis.tables import format_value, render_table
from fedexp.errors import require
from fedexp.experiment import DEFAULTS, PathLike, Row
from fedexp.optional import data_frame
from fedexp.storage import finite
from fedexp.text import option_text
from fedexp.tuning.grids import Point
from fedexp.tuning.search import EPS, EPS_VALUES, Choice, Search, Trial, TrialResult, window_of
from fedexp_command.parsers import FLAGS
from fedexp_command.rerun import rerun

if TYPE_CHECKING:
    import pandas
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
DARK = 0.617  # part of viridis on which text is white


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of a search.

    Attributes:
        search: what was searched.
        trials: all trials, best first; those of the rule of thumb in its order.
    """

    search: Search
    trials: list[Trial]

    def __repr__(self) -> str:
        names, count = self.search.base.names, len(self.trials)
        return f"Tuning({names.algorithm} on {names.task}: {count} trials, best {self.best})"

    @property
    def best(self) -> Point:
        """The best values by option; pass them on as `options=`."""
        require(
            any(
                math.isfinite(each.result.score) and each.result.diverged_at is None
                for each in self.trials
            ),
            f"no trial has a finite {self.search.metric}, so none is the best; widen the grid, or "
            "check the metric",
        )
        return dict(self.chosen.point)

    @property
    def score(self) -> float:
        """The score of the best trial: `search.metric`, averaged over the last 10 rounds."""
        return self.chosen.result.score

    @property
    def chosen(self) -> Trial:
        """The best trial, even if all have failed."""
        values = [each.point for each in self.trials]
        at = values.index({EPS: self.choice.eps}) if self.search.protocol == "epsilon" else 0
        return self.trials[at]

    @property
    def choice(self) -> Choice:
        """What the rule of thumb chose, and why it ended."""
        return self.search.choice(self.trials)

    def table(self, format: str = "text") -> str:
        """Return the ten best trials, or all of them as "csv"; all of the rule of thumb."""
        return render_table(format, *table_of([self], format == "csv"))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return one row per trial: its values and its result; see `RunResult.frame`."""
        return data_frame([{**each.point, **vars(each.result)} for each in self.trials])

    def plot(self, path: PathLike) -> Path:
        """Draw the scores over two options as a heat map."""
        require(len(self.search.values) == 2, "a picture needs a search over two options")
        picture = Path(path)
        check_writable(picture)
        save(tuning_figure(self), picture)
        return picture

    @property
    def command(self) -> str:
        """The command that trains with the best values, for the task's own number of rounds."""
        base, spec = self.search.base, self.search.at(self.chosen.point).spec
        pairs = {name: option_text(value) for name, value in base.options.items()}
        if isinstance(base.algorithm, Algorithm):  # taken as it is, which its name does not say
            pairs |= spec["set"]
        pairs |= {name: _exact(value) for name, value in self.chosen.point.items()}
        of_trials = ("rounds", "evaluate_every")
        given = [name for name in ("seed", *FLAGS) if getattr(base, name) != DEFAULTS.get(name)]
        return rerun({**spec, "set": pairs}, [name for name in given if name not in of_trials])

    @property
    def remarks(self) -> list[str]:
        """Notes on the best values: how many trials failed, and whether the grid ends there."""
        search, count = self.search, len(self.trials)
        diverged = sum(each.result.diverged_at is not None for each in self.trials)
        pruned = sum(each.result.pruned for each in self.trials)
        lines = [f"{diverged} of {count} trials diverged"] if diverged else []
        lines += [f"{pruned} of {count} trials were pruned"] if pruned else []
        for name, value in self.chosen.point.items():
            ends = search.values[name]
            if search.protocol == "paper" and len(ends) > 1 and value in (min(ends), max(ends)):
                side = "smallest" if value == min(ends) else "largest"
                lines.append(f"{name}={_number(value)} is the {side} of the grid; look beyond it")
        return lines

    @property
    def explanation(self) -> str:
        """One line: what the rule of thumb chose, and why it ended."""
        choice, metric = self.choice, self.search.metric
        value = [format_value(each.result.score, metric) for each in self.trials]
        what = f"{_training(metric)} ({_window(self.search)})"
        head = f"eps {choice.eps:.3g}: {what} is {value[self.trials.index(self.chosen)]}"
        if choice.ended == "average":
            return f"{head}, and every step size is 1 from here on: larger eps is FedAvg as well"
        if choice.ended == "edge":
            return f"{head} and has not dropped up to here, the largest value tried"
        low = " (smaller values are not part of the rule)" if choice.eps == EPS_VALUES[0] else ""
        verb = "drops" if self.search.goal.higher else "rises"
        last = self.trials[-1]
        fell = "diverges" if last.result.diverged_at is not None else f"{verb} to {value[-1]}"
        return f"{head} and {fell} at {last.point[EPS]:.3g}{low}"

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        trials = [finite({"values": each.point, **vars(each.result)}) for each in self.trials]
        head = {"algorithm": self.search.base.names.algorithm, "best": self.chosen.point}
        why = {"found": self.explanation} if self.search.protocol == "epsilon" else {}
        return {**head, "next": self.command, "trials": trials, **why}


def heading(tunings: Sequence[Tuning]) -> str:
    """Return one line: what was searched, and what the score is."""
    search, count = tunings[0].search, sum(len(each.trials) for each in tunings)
    kinds = {"paper": "grid", "free": "free search", "epsilon": "rule of thumb"}
    number = f"{count} {'trial' if count == 1 else 'trials'}"
    trials = f"{number} of {search.base.rounds} rounds, seed {search.base.seed}"
    score = f"{_training(search.metric)}, {_window(search)}"
    return f"{search.base.names.task}: {kinds[search.protocol]}, {trials}; score: {score}"


def table_of(tunings: Sequence[Tuning], exact: bool = False) -> Table:
    """Return the best values of each algorithm; of a single one, its ten best, or all if exact.

    Of the rule of thumb it has all values that were tried, with their step sizes.

    Args:
        tunings: the results of one or several algorithms.
        exact: write numbers in full, for programs, and empty cells for failed trials.
    """
    search, single = tunings[0].search, len(tunings) == 1
    metric, rule = search.metric, search.protocol == "epsilon"
    names = list(dict.fromkeys(name for each in tunings for name in each.search.values))
    test = metric.replace("train", "test")
    cells = []
    for tuning in tunings:
        most = len(tuning.trials) if exact or rule else TOP
        for each in tuning.trials[: most if single else 1]:
            first = [] if rule else [tuning.search.base.names.algorithm]
            point = [_number(each.point.get(name), exact) for name in names]
            results = [_result(each.result, metric, exact), _test(each.result, test, exact)]
            step = [_number(each.result.step, exact)] if rule else []
            cells.append([*first, *point, *results, *step])
    before, after = (["eps"], ["median step size"]) if rule else (["algorithm", *names], [])
    return _without_empty([*before, _words(metric), f"last {_words(test)}", *after], cells)


def _training(metric: str) -> str:
    return metric.replace("train_", "training ")


def _window(search: Search) -> str:
    first, last = window_of(search.base.length)
    return f"mean of rounds {first} to {last}"


def _without_empty(headers: list[str], cells: list[list[str]]) -> Table:
    """Return the table without empty columns: a task may have no test data."""
    filled = [k for k in range(len(headers)) if any(row[k] != "-" for row in cells)]
    return [headers[k] for k in filled], [[row[k] for k in filled] for row in cells]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _result(result: TrialResult, metric: str, exact: bool) -> str:
    if result.failed:
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


def tuning_figure(tuning: Tuning) -> Figure:
    """Draw the score of every trial, and the test accuracy beside it, as in Figure 1.

    A grid is drawn as a heat map, a free search as a scatter plot. The search has two options; the
    best trial, which only the score decides, is framed in both panels.
    """
    search, names = tuning.search, tuning.search.base.names
    (down, across), metric = _axes_of(search), search.metric
    tests = metric.startswith("train_") and any(
        each.result.test is not None for each in tuning.trials
    )
    figure, panels = new_figure(2 if tests else 1, width=5.2, height=4.2)
    first, last = window_of(search.base.length)
    shown = (
        ("score", metric, f", rounds {first} to {last}"),
        ("test", metric.replace("train", "test"), f" after {last} rounds"),
    )
    for panel, (field, name, when) in zip(panels, shown, strict=False):
        _panel(tuning, panel, field, name)
        heading = metric_title(name) + when
        label(panel, SYMBOLS.get(across, across), SYMBOLS.get(down, down), heading)
    entitle(figure, f"{names.algorithm} on {names.task}")
    return figure


def draw_heatmap(
    axes: Axes,
    across: Sequence[float],
    down: Sequence[float],
    cells: Cells,
    metric: str,
    frame: tuple[int, int] | None = None,
    higher: bool = True,
) -> None:
    """Draw a heat map with small values at the bottom left; NaN is grey.

    Args:
        axes: where to draw.
        across: values along the horizontal axis.
        down: values along the vertical axis.
        cells: one number per pair, shape [down, across].
        metric: name of the metric; accuracies are shown in percent, losses on a log scale.
        frame: row and column of the cell to frame.
        higher: whether larger values are better.
    """
    from matplotlib.patches import Rectangle

    colours = _colours(cells, higher)
    axes.grid(False)
    axes.set_facecolor(DIVERGED)
    axes.imshow(cells, origin="lower", aspect="auto", **colours)
    axes.set_xticks(range(len(across)), [f"{value:.3g}" for value in across])
    axes.set_yticks(range(len(down)), [f"{value:.3g}" for value in down])
    for (row, column), value in np.ndenumerate(cells):
        shade = float(colours["norm"](value)) if np.isfinite(value) else np.nan
        is_dark = shade < DARK if higher else shade > 1 - DARK
        colour = "white" if is_dark else "black"
        axes.text(column, row, _short(value, metric), ha="center", va="center", color=colour)
    if frame is not None:
        corner = (frame[1] - 0.5, frame[0] - 0.5)
        box = Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=3, clip_on=False)
        axes.add_patch(box)


def _panel(tuning: Tuning, axes: Axes, field: str, metric: str) -> None:
    search, trials = tuning.search, tuning.trials
    down, across = _axes_of(search)
    value = {(each.point[down], each.point[across]): _value(each, field) for each in trials}
    if search.protocol == "free":
        _scatter(axes, value, search.goal.higher)
        return
    rows, columns = sorted(search.values[down]), sorted(search.values[across])
    cells = np.array([[value.get((y, x), np.nan) for x in columns] for y in rows])
    best = trials[0].point
    chosen = (rows.index(best[down]), columns.index(best[across]))
    draw_heatmap(axes, columns, rows, cells, metric, chosen, search.goal.higher)


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


def _axes_of(search: Search) -> tuple[str, str]:
    """Return the options of the vertical and the horizontal axis; `local.lr` is horizontal."""
    first, second = search.values
    return (second, first) if first == "local.lr" else (first, second)


def _value(trial: Trial, field: str) -> float:
    value = getattr(trial.result, field)
    return float("nan") if trial.result.failed or value is None else float(value)


def _colours(cells: Cells, higher: bool) -> dict[str, Any]:
    from matplotlib.colors import LogNorm, Normalize

    known = cells[np.isfinite(cells)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    if higher:
        return {"cmap": "viridis", "norm": Normalize(low, high)}
    # a loss close to divergence would leave one colour for all others
    scale = LogNorm(low, min(high, SPAN * low)) if low > 0 else Normalize(low, high)
    return {"cmap": "viridis_r", "norm": scale}


def _short(value: float, metric: str) -> str:
    if not np.isfinite(value):
        return "div."
    percent = metric.endswith("accuracy")
    return f"{100 * value:.1f}" if percent else format_value(value, metric)
