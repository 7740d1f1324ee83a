"""One, two and four ranks, each a process, compute the same records and weights."""

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
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank, by (world size, rank)."""
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
def test_results_do_not_depend_on_the_number_of_ranks(results: Results, name: str) -> None:
    rows, model, states = cases.result(name)
    assert torch.isfinite(model).all()
    for world in WORLDS:
        other_rows, their_model, their_states = results[world, 0][name]
        torch.testing.assert_close(their_model, model, **CLOSE)
        torch.testing.assert_close(their_states, states, **CLOSE)
        for row, other in zip(rows, other_rows, strict=True):
            assert other == pytest.approx(row, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_bitwise(results: Results, name: str) -> None:
    """Ranks never exchange model weights, so each must compute the same ones."""
    for world in WORLDS:
        rows, model, states = results[world, 0][name]
        for rank in range(1, world):
            other_rows, their_model, their_states = results[world, rank][name]
            assert other_rows == rows
            assert torch.equal(their_model, model)
            assert their_states.keys() == states.keys()
            assert all(torch.equal(their_states[each], states[each]) for each in states)


def test_ranks_that_train_different_models_are_refused(results: Results) -> None:
    for world in (2, 4):
        for rank in range(world):
            assert "the ranks train different models (round 1)" in results[world, rank]["drift"]


def test_the_cases_cover_what_they_claim() -> None:
    assert [row["dropped"] for row in cases.result("broken")[0]] == [2] * cases.ROUNDS
    assert [row["clients"] for row in cases.result("all-broken")[0]] == [0] * cases.ROUNDS
    assert len(cases.result("scaffold-loop")[2]) > 5
    assert len(cases.result("diloco")[2]) > 5 * 3
