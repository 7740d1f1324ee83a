"""The pages of docs/coming-from: their programs, ours, and the accuracies that are recorded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCS = BENCHMARKS.parent / "docs" / "coming-from"
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


@pytest.fixture(scope="module")
def coming_from() -> Any:
    sys.path.insert(0, str(BENCHMARKS))  # it imports `machine`
    try:
        spec = importlib.util.spec_from_file_location("coming_from", BENCHMARKS / "coming_from.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def test_every_page_has_a_package(coming_from: Any) -> None:
    assert sorted(coming_from.PACKAGES) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_their_program_and_ours(coming_from: Any, page: str) -> None:
    theirs, ours = coming_from.blocks(page)
    compile(theirs, page, "exec")
    assert ours == coming_from.blocks("flower")[1]


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_a_page_is_short(page: str) -> None:
    assert len((DOCS / f"{page}.md").read_text().split()) < 900


def test_our_program_has_the_recorded_accuracy(coming_from: Any) -> None:
    path = max((BENCHMARKS / "records").glob("*-coming-from.json"))
    found = json.loads(path.read_text())["rows"][1]
    assert (found["package"], found["algorithm"]) == ("FedExP", "fedexp")
    code = coming_from.blocks("flower")[1].replace('"fedavg"', '"fedexp"')
    measured = coming_from.accuracy(code, 0, sys.executable)
    assert measured == pytest.approx(found["accuracies"][0], abs=0.01)  # 4 of 397 images
