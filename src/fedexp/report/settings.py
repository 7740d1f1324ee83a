"""What the series of a section have in common, and what sets them apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.experiments.setup import Setup
from fedexp.local import LocalTraining
from fedexp.report.gather import Series, Settings, differing


def shared_and_apart(every: Sequence[Series]) -> tuple[Settings, list[str]]:
    """The settings of all series, and the names of those worth a column of their own.

    A name that only some algorithms have is worth one where it is not at its default.
    """
    apart = differing([series.settings for series in every])
    shared = {name: v for name, v in every[0].settings.items() if name not in apart}
    return shared, [name for name in apart if _matters(name, every)]


def _matters(name: str, every: Sequence[Series]) -> bool:
    having = [series for series in every if name in series.settings]
    values = {str(series.settings[name]) for series in having}  # a spec has infinity in words
    defaults = {str(_defaults(series.algorithm).get(name)) for series in having}
    return len(values) > 1 or values != defaults


@cache
def _defaults(algorithm: str) -> dict[str, Any]:
    if algorithm not in ALGORITHMS:
        return {}
    return Setup(ALGORITHMS[algorithm](), LocalTraining()).options()
