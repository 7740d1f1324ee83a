"""Colours and dashes of the series, by day and by night.

The numbers behind the curves of a page, as plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedexp.analysis.plots import NAMES, colour
from fedexp.analysis.report.sections import (
    WINDOW,
    Curve,
    Section,
    Series,
    Spread,
    spans_decades,
    status,
)
from fedexp.analysis.tables import format_value
from fedexp.errors import unknown_name

# Day colours that would drown in a dark page, brought up; the order of hues is the same.
NIGHT = {
    "fedexp": "#F5843C",
    "fedavg": "#4393DB",
    "scaffold": "#2BC497",
    "fedadagrad": "#E08FBE",
    "fedprox": "#93D7FF",
    "fedadam": "#F2B632",
    "fedavgm": "#C9A866",
    "fedyogi": "#A8A8A8",
    "scaffold-exp": "#A4E8D4",
    "fedexp-m": "#FF9C8F",
    "fedprox-exp": "#B7ABFF",
}
# An algorithm in several settings keeps its colour: the dash tells them apart.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SVG_DASHES = ("none", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3")
MPL_DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2)))


def day(algorithm: str) -> str:
    """The colour on white, as in all other figures."""
    return colour(algorithm)


def night(algorithm: str) -> str:
    """The colour on a dark page; white for an algorithm that has none."""
    return NIGHT.get(algorithm, "#F2F2F2")


JUDGES = ("test_accuracy", "train_accuracy", "train_loss")  # the first that a task has
CHARTS = (
    "test_accuracy",
    "train_accuracy",
    "test_loss",
    "train_loss",
    "server_lr",
    "diversity",
)
TITLES = {**NAMES, "diversity": "diversity ratio", "eps_share": "share of eps"}
Payload = dict[str, Any]


def chart_names(section: Section, wanted: Sequence[str]) -> list[str]:
    """The charts of a section: those asked for, or the usual ones, as far as it has the data."""
    return [name for name in wanted or CHARTS if name in section.names]


def check_metrics(sections: Sequence[Section], wanted: Sequence[str]) -> None:
    """A metric that no run has is a mistake."""
    known = {name for section in sections for name in section.names} - {"round"}
    for name in wanted:
        if name not in known:
            raise unknown_name("metric", name, known)


def judge(section: Section, wanted: Sequence[str]) -> str:
    """The metric that the table compares: one asked for, the task's own, or what there is."""
    for name in (*wanted, section.runs[0].environment.get("metric"), *JUDGES):
        if name in section.names and str(name).endswith(("accuracy", "loss")):
            return str(name)
    return JUDGES[-1]


def section_payload(
    section: Section, names: Sequence[str], metric: str, target: float | None
) -> Payload:
    """All that the page's script needs to draw a section."""
    keys = [
        {"name": s.label, "day": day(s.algorithm), "night": night(s.algorithm), "dash": _dash(s)}
        for s in section.series
    ]
    charts = [_chart(section, name, target if name == metric else None) for name in names]
    return {"series": keys, "charts": charts}


def describe(section: Section, name: str) -> str:
    """A chart in words, for those who do not see it."""
    ends = []
    for series in section.series:
        pooled = series.spread(name)
        if pooled.rounds.size:
            last = format_value(float(pooled.mean[-1]), name)
            ends.append(f"{series.label} {last} at round {pooled.rounds[-1]:.0f}")
    return f"Line chart of {title(name)} against rounds. It ends with {'; '.join(ends)}."


def title(name: str) -> str:
    """What a metric is called."""
    return TITLES.get(name, name.replace("_", " "))


def _chart(section: Section, name: str, target: float | None) -> Payload:
    curves = [_curve(at, series, name) for at, series in enumerate(section.series)]
    every = [curve for series in section.series for curve in series.curves(name)]
    return {
        "name": name,
        "percent": name.endswith("accuracy"),
        "log": not name.endswith("accuracy") and spans_decades(every),
        "target": target,
        "curves": [curve for curve in curves if curve["raw"]["rounds"]],
    }


def _curve(at: int, series: Series, name: str) -> Payload:
    return {
        "series": at,
        "runs": len(series.runs),
        "raw": _points(series.spread(name)),
        "smooth": _points(series.spread(name, WINDOW)),
        "ends": _ends(series, name),
    }


def _points(pooled: Spread) -> Payload:
    whole = {name: getattr(pooled, name).astype(int).tolist() for name in ("rounds", "seeds")}
    return {**{name: _short(values) for name, values in vars(pooled).items()}, **whole}


def _ends(series: Series, name: str) -> list[Payload]:
    """Where a run broke off: the last point of its own curve, and why."""
    ends = []
    for run, curve in zip(series.runs, series.curves(name), strict=True):
        known = np.flatnonzero(~np.isnan(curve))
        text = status(run)
        if known.size and text.startswith(("diverged", "unfinished")):
            place = {"round": int(known[-1]) + 1, "value": _short(curve[known[-1:]])[0]}
            ends.append({**place, "seed": run.spec["seed"], "status": text})
    return ends


def _short(values: Curve) -> list[float | None]:
    """Six digits, which no screen can tell from more."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def _dash(series: Series) -> str:
    return DASHES[series.variant % len(DASHES)]
