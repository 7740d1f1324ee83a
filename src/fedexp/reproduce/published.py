"""The paper's numbers and claims, and tables that compare ours with them.

`published.toml` holds what the paper prints, and how its claims are judged: `quantity`, `claim` and
`target` read it; `study_fields` reads `studies.toml`. A `Table` has lines of our values, one per
task and series; a column that the paper has too is shown with the published value and the
difference.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fedexp.analysis.summary import WINDOW


@dataclass(frozen=True)
class Value:
    """A number, its spread and its bounds.

    Attributes:
        mean: the number, or None where there is none.
        spread: its standard deviation, or None.
        more: whether `mean` is only a lower bound.
        remark: why it is not a plain number, e.g. "diverged".
    """

    mean: float | None
    spread: float | None = None
    more: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Quantity:
    """A published column: what was measured, in which unit, and the values.

    Attributes:
        place: table, figure or section.
        meaning: what the number is.
        unit: "rounds", "times" or "%".
        approximate: whether it comes from a figure: two digits, their cells inferred.
        values: by task and series; a series is an algorithm or a setting.
        note: a caveat.
    """

    place: str
    meaning: str
    unit: str
    approximate: bool
    values: Mapping[str, Mapping[str, Value]]
    note: str = ""

    def find(self, task: str, series: str) -> Value | None:
        """Return the published value, or None where the paper has none.

        A reading of eps, `fedexp (participants x eps)`, has that of its algorithm: the paper does
        not state which reading its numbers are of.
        """
        own = self.values.get(task, {})
        return own.get(series, own.get(series.partition(" (")[0]))


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and how it is judged.

    Attributes:
        text: the statement.
        place: table, figure or section.
        criterion: the condition under which it holds; one, without alternatives.
        threshold: the number in the criterion; 0 if it has none.
    """

    text: str
    place: str
    criterion: str
    threshold: float = 0.0


def quantity(name: str) -> Quantity:
    """Return a quantity by name.

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
    """Return a claim of a study.

    >>> claim("table1", "speedup").criterion
    "FedAvg's mean of first crossings is at least 1.4 times FedExP's"
    """
    raw = _document()["claims"][study][key]
    criterion = raw["criterion"].format(threshold=raw.get("threshold"))
    return Claim(**{**raw, "criterion": criterion})


def claims(study: str) -> list[Claim]:
    """Return all claims of a study, in the order of the document."""
    return [claim(study, key) for key in _document()["claims"].get(study, {})]


def target(task: str) -> float:
    """Return the target test accuracy of Table 1, as a fraction (docs/paper.md#targets)."""
    return float(_document()["targets"]["values"][task]) / 100


def parse(value: Any) -> Value:
    """Parse a value of `published.toml`.

    >>> parse([86.96, 0.58]), parse(">2.06").more
    (Value(mean=86.96, spread=0.58, more=False, remark=''), True)
    """
    if isinstance(value, list):
        mean, spread = value
        return Value(float(mean), float(spread))
    text = str(value)
    return Value(float(text.removeprefix(">")), more=text.startswith(">"))


def study_fields(name: str) -> dict[str, Any]:
    """Return the name of a study and what `studies.toml` states of it: fields of `Study`.

    >>> study_fields("momentum")["seeds"]
    {'cifar10': 3, 'cifar100': 3}
    """
    document = _document("studies.toml")
    notes = {key: text.format(window=WINDOW) for key, text in document["notes"].items()}
    own = document["studies"][name]
    return {**own, "name": name, "remarks": tuple(each.format(**notes) for each in own["remarks"])}


@cache
def _document(name: str = "published.toml") -> dict[str, Any]:
    return tomllib.loads((files("fedexp.reproduce") / name).read_text("utf-8"))


NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A measured quantity; `published` names the paper's, where it prints one."""

    name: str
    unit: str
    published: str | None = None

    def source(self) -> Quantity | None:
        return quantity(self.published) if self.published else None


@dataclass(frozen=True)
class Line:
    """The values of one series on one task, by column name."""

    task: str
    series: str
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Table:
    """Lines and columns; `series` is the header of the second column.

    Methods take `comparable`, whether differences from the published values are meaningful, and
    `partial`, the tasks for which they are not because data are missing.
    """

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    series: str = "algorithm"

    def headers(self) -> list[str]:
        names = ["task", self.series]
        for column in self.columns:
            names.append(column.name)
            if source := column.source():
                names += ["paper (approx.)" if source.approximate else "paper", "difference"]
        return names

    def _compared(
        self, line: Line, comparable: bool, partial: Collection[str]
    ) -> Iterator[tuple[Column, Value | None, Quantity | None, Value | None, float | None]]:
        """Yield each column with our value, the paper's and the difference."""
        for column in self.columns:
            ours, source = line.values.get(column.name), column.source()
            theirs = source.find(line.task, line.series) if source else None
            meaningful = comparable and line.task not in partial
            yield column, ours, source, theirs, difference(ours, theirs) if meaningful else None

    def cells(self, comparable: bool, partial: Collection[str] = ()) -> list[list[str]]:
        """Return the cells as text."""
        rows = []
        for line in self.lines:
            row = [line.task, line.series]
            for column, ours, source, theirs, gap in self._compared(line, comparable, partial):
                row.append(text_of(ours, column.unit))
                if source:
                    paper = text_of(theirs, column.unit, exact=not source.approximate)
                    row += [paper, signed(gap, column.unit)]
            rows.append(row)
        return rows

    def numbers(
        self, comparable: bool, partial: Collection[str] = ()
    ) -> tuple[list[str], list[list[str]]]:
        """Return headers and cells for programs: plain numbers, empty where there is none."""
        rows, headers = [], ["task", self.series]
        for line in self.to_json(comparable, partial):
            flat = {key: line[key] for key in headers[:2]}
            for column in self.columns:
                flat |= _flat(column, line[column.name])
            headers = [*flat, "comparable"]
            cells = ["" if cell is None else str(cell) for cell in flat.values()]
            rows.append([*cells, "yes" if comparable and line["task"] not in partial else "no"])
        return headers, rows

    def to_json(self, comparable: bool, partial: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return one object per line, with numbers as numbers."""
        rows = []
        for line in self.lines:
            row: dict[str, Any] = {"task": line.task, self.series: line.series}
            for column, ours, source, theirs, gap in self._compared(line, comparable, partial):
                paper = {"paper": _plain(theirs), "difference": _rounded(gap)} if source else {}
                row[column.name] = {"unit": column.unit, "ours": _plain(ours), **paper}
            rows.append(row)
        return rows


def difference(ours: Value | None, theirs: Value | None) -> float | None:
    """Return ours minus the paper's, or None unless both are plain numbers.

    >>> difference(Value(200.0), Value(186.0)), difference(Value(200.0), Value(500.0, more=True))
    (14.0, None)
    """
    if ours is None or theirs is None or ours.mean is None or theirs.mean is None:
        return None
    return None if ours.more or theirs.more else ours.mean - theirs.mean


def text_of(value: Value | None, unit: str, exact: bool = True) -> str:
    """Format a value as a cell; one that is not `exact` keeps the digits it was printed with.

    >>> text_of(Value(86.96, 0.58), "%"), text_of(Value(500.0, more=True), "rounds")
    ('86.96% ± 0.58', '>500')
    """
    if value is None:
        return NOTHING
    if value.mean is None:
        return value.remark or NOTHING
    more = ">" if value.more else ""
    spread = f" ± {_number(value.spread, unit)}" if value.spread is not None else ""
    remark = f" ({value.remark})" if value.remark else ""
    number = _number(value.mean, unit) if exact else f"{value.mean:g}"
    return f"{more}{number}{_sign(unit)}{spread}{remark}"


def signed(gap: float | None, unit: str) -> str:
    """Format a difference as a cell with its sign."""
    if gap is None:
        return NOTHING
    return f"{'+' if gap >= 0 else '-'}{_number(abs(gap), unit)}{_sign(unit)}"


def winners(values: Mapping[str, Value], lowest: bool) -> list[str]:
    """Return the series with the lowest or highest plain number; several if they tie.

    >>> winners({"a": Value(3.0), "b": Value(2.0), "c": Value(1.0, more=True)}, lowest=True)
    ['b']
    """
    known = {name: v.mean for name, v in values.items() if v.mean is not None and not v.more}
    top = (min if lowest else max)(known.values(), default=None)
    return [name for name, number in known.items() if number == top]


def best(values: Mapping[str, Value], lowest: bool) -> str | None:
    """Return the first of the winners, or None if there is no number."""
    return next(iter(winners(values, lowest)), None)


def _number(number: float, unit: str) -> str:
    if unit == "rounds":
        return f"{number:.1f}".removesuffix(".0")
    return f"{number:.2f}" if unit in ("%", "times") else f"{number:.3g}"


def _sign(unit: str) -> str:
    return {"%": "%", "times": "x"}.get(unit, "")


def _flat(column: Column, entry: Mapping[str, Any]) -> dict[str, Any]:
    ours = entry["ours"] or {}
    values = {"": ours.get("mean"), " std": ours.get("spread"), " at least": ours.get("more")}
    if column.published:
        paper = entry["paper"] or {}
        values |= {" paper": paper.get("mean"), " paper at least": paper.get("more")}
        values[" difference"] = entry["difference"]
    return {f"{column.name}{ending}": value for ending, value in values.items()}


def _plain(value: Value | None) -> dict[str, Any] | None:
    return {name: _rounded(each) for name, each in vars(value).items()} if value else None


def _rounded(value: Any) -> Any:
    """Round to 10 digits: 72.13, not 72.13000000000001."""
    return float(f"{value:.10g}") if isinstance(value, float) else value
