"""Results are those that are stored: records and weights to the bit, and printed tables.

Bits depend on the versions of torch and numpy and on the processor (`essence.arithmetic`). Where
these are not those of the stored results, digests are skipped and numbers may differ by 1e-4,
relatively. A change that is meant to change results stores them anew: `python -m tests.golden`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.golden.cases import CASES, compute
from tests.golden.essence import arithmetic, differences, stored

GOLDENS = stored()
EXACT = GOLDENS.pop("arithmetic") == arithmetic()
SOME = "simulate digits fedexp loop"
TABLE = "compare digits"


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_stored_ones(name: str) -> None:
    found = differences(GOLDENS[name], compute(name), EXACT)
    assert not found, "\n".join([name, *found])


def test_every_case_is_stored() -> None:
    assert list(GOLDENS) == list(CASES)


def changed(name: str, path: str, value: Any) -> tuple[Any, Any]:
    """Return a stored essence, and the same with another leaf."""
    other = deepcopy(GOLDENS[name])
    *parents, leaf = (int(key) if key.isdigit() else key for key in path.split("/"))
    inner: Any = other
    for key in parents:
        inner = inner[key]
    assert inner[leaf] != value
    inner[leaf] = value(inner[leaf]) if callable(value) else value
    return GOLDENS[name], other


@pytest.mark.parametrize(
    ("name", "path", "value", "close"),
    [
        (SOME, "rows/train_loss/0", lambda loss: loss * (1 + 5e-5), True),
        (SOME, "rows/train_loss/0", lambda loss: loss * (1 + 5e-4), False),
        (SOME, "rows/train_loss/1", "sha:00000000", True),
        (SOME, "model/0", lambda norm: -norm, False),
        (SOME, "model/1", "sha:000000000000", True),
        (SOME, "rows/clients", 9, False),
        (SOME, "rows/dropped", None, False),
        (SOME, "rows", {}, False),
        (TABLE, "tables/text", lambda text: text.replace("1.17x", "1.18x"), True),
        (TABLE, "tables/text", lambda text: text.replace("1.17x", "1.19x"), False),
        (TABLE, "tables/text", lambda text: text.replace("fedavg", "fedavgm"), False),
        (TABLE, "tables/csv", lambda text: text.replace("fedexp,2,", "fedexp,9,"), False),
    ],
)
def test_what_counts_as_a_difference(name: str, path: str, value: Any, close: bool) -> None:
    """Every change counts where the arithmetic is the same, and large ones where it is not."""
    expected, other = changed(name, path, value)
    assert not differences(expected, expected, exact=True)
    lines = differences(expected, other, exact=True)
    assert lines
    assert lines[0].startswith(f"/{path}")
    assert bool(differences(expected, other, exact=False)) is not close


def test_new_columns_are_no_difference() -> None:
    expected, other = deepcopy(GOLDENS[SOME]), deepcopy(GOLDENS[SOME])
    other["rows"]["test_f1"] = 0.5
    assert not differences(expected, other, exact=True)
    assert differences(other, expected, exact=True) == ["/rows/test_f1: 0.5 is now None"]
