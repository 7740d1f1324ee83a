"""The paper's numbers as data, against a second, independent transcription.

The texts below are the rows of the tables as printed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files

import pytest

from fedexp.reproduce import STUDIES, published
from fedexp.reproduce.published import Value, quantity, target

TASKS = {"EMNIST": "emnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "CINIC-10": "cinic10"}
NAMES = ("table1-rounds", "table1-ratio", "epsilon-table", "long-run", "figure1")
TABLE_1 = """
EMNIST | 84% | 186 | 328 (1.76x) | 232 (1.24x) | 277 (1.48x)
CIFAR-10 | 72% | 267 | 434 (1.62x) | 429 (1.61x) | 419 (1.56x)
CIFAR-100 | 40% | 242 | 500 (2.06x) | >500 (>2.06x) | 494 (2.04x)
CINIC-10 | 58% | 318 | 450 (1.42x) | 470 (1.48x) | 444 (1.40x)
"""
TABLE_4 = """
EMNIST | 85.40 | 86.26 | 85.73 | 85.49 | 84.90
CIFAR-10 | 84.79 | 77.82 | 77.63 | 77.66 | 77.64
CIFAR-100 | 59.01 | 44.76 | 44.21 | 44.37 | 44.40
CINIC-10 | 66.31 | 60.93 | 61.05 | 60.47 | 60.96
"""
TABLE_5 = """
EMNIST | 86.96 +- 0.58 | 85.78 +- 0.35 | 86.22 +- 0.35 | 85.53 +- 1.04 | 85.77 +- 0.39
CIFAR-10 | 82.94 +- 0.42 | 80.10 +- 0.56 | 82.02 +- 0.30 | 80.21 +- 0.60 | 80.16 +- 0.59
CIFAR-100 | 54.65 +- 0.49 | 49.63 +- 0.37 | 49.40 +- 0.38 | 49.64 +- 0.39 | 49.47 +- 0.31
CINIC-10 | 66.45 +- 1.28 | 64.87 +- 0.44 | 64.61 +- 0.49 | 64.87 +- 0.44 | 64.52 +- 0.45
"""
FIGURE_1 = """
5.8 8.2 42 55 9.1
16 46 58 71 55
46 60 73 77 6.2
36 57 60 50 6
10 6.4 6.1 5.7 4.8
"""


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in text.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        yield TASKS[name], cells


def test_table_1() -> None:
    rounds, ratio = quantity("table1-rounds"), quantity("table1-ratio")
    for task, (goal, *cells) in rows(TABLE_1):
        assert goal == f"{100 * target(task):.0f}%"
        for name, cell in zip(("fedexp", "fedavg", "scaffold", "fedadagrad"), cells, strict=True):
            needed, *times = re.findall(r"(>?)([\d.]+)", cell)
            assert rounds.find(task, name) == Value(float(needed[1]), more=bool(needed[0]))
            expected: list[Value | None] = [
                Value(float(number), more=bool(sign)) for sign, number in times
            ]
            assert [ratio.find(task, name)] == (expected or [None])


def test_ratios_follow_from_the_rounds() -> None:
    rounds, ratio = quantity("table1-rounds"), quantity("table1-ratio")
    for task, values in ratio.values.items():
        reference = rounds.values[task]["fedexp"].mean
        for name, printed in values.items():
            own = rounds.values[task][name]
            assert own.mean is not None
            assert reference is not None
            assert printed.mean == pytest.approx(own.mean / reference, abs=0.01)  # some are cut off
            assert printed.more == own.more


def test_table_4() -> None:
    table = quantity("epsilon-table")
    for task, cells in rows(TABLE_4):
        assert [(v.mean, v.spread) for v in table.values[task].values()] == [
            (float(cell), None) for cell in cells
        ]
        assert list(table.values[task]) == ["10^-3", "10^-2.5", "10^-2", "10^-1.5", "10^-1"]


def test_table_5() -> None:
    table = quantity("long-run")
    for task, cells in rows(TABLE_5):
        for name, cell in zip(
            ("fedexp", "fedavg", "scaffold", "fedadagrad", "fedprox"), cells, strict=True
        ):
            assert table.find(task, name) == published.parse([*cell.split("+-")])


def test_figure_1_is_marked_as_approximate() -> None:
    figure = quantity("figure1")
    grid = [list(map(float, line.split())) for line in FIGURE_1.strip().splitlines()]
    for server, row in zip(("0.1", "0.3", "1", "3", "10"), grid, strict=True):
        for client, number in zip(("0.01", "0.03", "0.1", "0.3", "1"), row, strict=True):
            assert figure.find("emnist", f"{server}, {client}") == Value(number)
    assert figure.approximate
    assert not any(quantity(name).approximate for name in NAMES if name != "figure1")


@pytest.mark.parametrize("name", NAMES)
def test_every_quantity_has_a_place_a_unit_and_sensible_values(name: str) -> None:
    table = quantity(name)
    assert re.search(r"(Table|Figure) \d", table.place)
    assert table.meaning
    low, high = {"%": (1, 100), "rounds": (1, 2000), "times": (1, 3)}[table.unit]
    assert set(table.values) <= set(TASKS.values())
    for values in table.values.values():
        assert all(v.mean is not None and low <= v.mean <= high for v in values.values())
        assert all(v.spread is None or 0 < v.spread < 2 for v in values.values())


def test_the_document_holds_nothing_else() -> None:
    text = (files("fedexp.reproduce") / "published.toml").read_text("utf-8")
    document = tomllib.loads(text)
    assert set(document) == {"targets", "quantities", "claims"}
    assert tuple(document["quantities"]) == NAMES
    for claims in document["claims"].values():
        for entry in claims.values():
            assert set(entry) - {"threshold"} == {"place", "text", "criterion"}
            assert ("threshold" in entry) == ("{threshold:g}" in entry["criterion"])
            assert not re.search(r"\bor\b", entry["criterion"])  # one condition
            assert re.search(r"(Table|Figures?) \d|sec\. \d|App\. [A-F]", entry["place"])


def test_the_document_of_studies_is_used_in_whole() -> None:
    text = (files("fedexp.reproduce") / "studies.toml").read_text("utf-8")
    document = tomllib.loads(text)
    assert set(document) == {"notes", "studies"}
    assert list(document["studies"]) == sorted(document["studies"], key=list(STUDIES).index)
    assert document["studies"].keys() == STUDIES.keys()
    used = {remark for study in document["studies"].values() for remark in study["remarks"]}
    assert {f"{{{note}}}" for note in document["notes"]} < used
    for study in STUDIES.values():
        assert not any("{" in remark for remark in study.remarks)
