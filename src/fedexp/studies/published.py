"""What the paper prints, read from `published.toml`: figures, targets and claims."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Value:
    """A number with what is known of it.

    Attributes:
        mean: the number, or None where there is none.
        spread: its standard deviation, or None.
        more: whether the true number is more than that.
        remark: why it is not a plain number, e.g. "diverged".
    """

    mean: float | None
    spread: float | None = None
    more: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Quantity:
    """A column of the paper: what was measured, in which unit, and the values.

    Attributes:
        place: table, figure or section.
        meaning: what the number is.
        unit: "rounds", "times" or "%".
        approximate: whether it comes from no table: of two digits, its place inferred.
        values: by task and series; a series is an algorithm or a setting.
        note: what to know before relying on it.
    """

    place: str
    meaning: str
    unit: str
    approximate: bool
    values: Mapping[str, Mapping[str, Value]]
    note: str = ""

    def find(self, task: str, series: str) -> Value | None:
        """The published value, or None where the paper has none."""
        return self.values.get(task, {}).get(series)


@dataclass(frozen=True)
class Claim:
    """What the paper says in words, and where."""

    text: str
    place: str


def quantity(name: str) -> Quantity:
    """A quantity by name.

    >>> quantity("table1-rounds").find("cifar100", "scaffold")
    Value(mean=500.0, spread=None, more=True, remark='')
    """
    raw = dict(_document()["quantities"][name])
    values = {
        task: {series: parse(value) for series, value in row.items()}
        for task, row in raw.pop("values").items()
    }
    return Quantity(**raw, values=values)


def claim(study: str, key: str) -> Claim:
    """A claim of a study."""
    return Claim(**_document()["claims"][study][key])


def target(task: str) -> float:
    """The target accuracy of Table 1, as a fraction."""
    return float(_document()["targets"]["values"][task]) / 100


def parse(value: Any) -> Value:
    """A value as `published.toml` writes it.

    >>> parse([86.96, 0.58]), parse(">2.06").more
    (Value(mean=86.96, spread=0.58, more=False, remark=''), True)
    """
    if isinstance(value, list):
        mean, spread = value
        return Value(float(mean), float(spread))
    text = str(value)
    return Value(float(text.removeprefix(">")), more=text.startswith(">"))


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads((files("fedexp.studies") / "published.toml").read_text("utf-8"))
