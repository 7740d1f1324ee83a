"""One, two and four ranks give the same records and weights: the processes are really started."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.distributed import cases
from tests.distributed.cases import CASES
from tests.helpers.processes import finished

WORLDS = (1, 2, 4)
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
Results = dict[tuple[int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank of every world came to."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, cases.__file__, str(folder), *map(str, WORLDS)]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return {
        (world, rank): torch.load(folder / f"{world}-{rank}.pt")
        for world in WORLDS
        for rank in range(world)
    }


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_gives_the_same(found: Results, name: str) -> None:
    rows, model, kept = cases.result(name)
    assert torch.isfinite(model).all()
    for world in WORLDS:
        others, theirs, states = found[world, 0][name]
        torch.testing.assert_close(theirs, model, **CLOSE)
        torch.testing.assert_close(states, kept, **CLOSE)
        for row, other in zip(rows, others, strict=True):
            assert other == pytest.approx(row, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_to_the_bit(found: Results, name: str) -> None:
    """They never send each other a model, so it must be the same without."""
    for world in WORLDS:
        rows, model, kept = found[world, 0][name]
        for rank in range(1, world):
            others, theirs, states = found[world, rank][name]
            assert others == rows
            assert torch.equal(theirs, model)
            assert states.keys() == kept.keys()
            assert all(torch.equal(states[client], kept[client]) for client in kept)


def test_ranks_that_train_different_models_are_refused(found: Results) -> None:
    for world in (2, 4):
        for rank in range(world):
            assert "the ranks train different models (round 1)" in found[world, rank]["drift"]


def test_the_cases_are_what_they_are_meant_to_be() -> None:
    assert [row["dropped"] for row in cases.result("broken")[0]] == [2] * cases.ROUNDS
    assert [row["clients"] for row in cases.result("all-broken")[0]] == [0] * cases.ROUNDS
    assert len(cases.result("scaffold-loop")[2]) > 5
