"""Colours and dashes of the series, by day and by night."""

from __future__ import annotations

from fedexp.experiments.canvas import colour

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
