"""A run that ended as diverged can be continued from its last good checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedexp.algorithms import fedadam
from fedexp.cli.main import main
from fedexp.client import Prox
from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.objective import Buffers
from fedexp.runs import load_run
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.fingerprint import fingerprint_of_rules
from fedexp.runs.folder import RESULT, RunFolder
from fedexp.runs.journal import Journal, is_finite
from tests.runs.helpers import execute_in, tiny, untimed

CPU = torch.device("cpu")
SPEC = {
    "task": "app", "algorithm": "fedadam", "mode": "paper", "seed": 0, "rounds": 9,
    "evaluate_every": 1, "engine": "flower", "deterministic": False, "set": {}, "options": {},
}  # fmt: skip


def state(round: int, value: float = 1.0) -> SimulationState:
    params = torch.full((3,), value)
    start = SimulationState.of(params, Buffers.none(), fedadam())
    return replace(start, round=round)


def diverged_after(folder: Path, rounds: int, values: dict[int, float] | None = None) -> None:
    """A federation that diverges in the round after; a value per round, where it is not 1."""
    with RunFolder(folder, SPEC, {}) as held:
        journal = Journal(held, 0.0, CPU)
        for round in range(len(journal.rows) + 1, rounds + 1):
            journal.add(
                {"round": round, "seconds": 0.0}, state(round, (values or {}).get(round, 1))
            )
        journal.conclude("diverged", None, DivergedError(rounds + 1, "the training loss is 1e300"))
        journal.close()


def resumed_at(folder: Path) -> int:
    with RunFolder(folder, SPEC, {}) as held:
        journal = Journal(held, 0.0, CPU)
        journal.close()
        return journal.resumed_from


def test_a_federation_that_diverged_continues_after_its_last_good_round(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    diverged_after(tmp_path, 3)
    assert load_run(tmp_path).outcome().status == "diverged"
    assert main(["resume", str(tmp_path), "--reopen"]) == 0
    assert "continues after round 3: start its app again" in capfd.readouterr().err
    assert load_run(tmp_path).result is None
    assert resumed_at(tmp_path) == 3
    (noted,) = load_run(tmp_path).environment["reopened"]
    assert (noted["round"], noted["diverged_at"]) == (3, 4)
    assert noted["reason"] == "the training loss is 1e300"
    assert main(["resume", str(tmp_path), "--reopen"]) == 2
    assert "has not diverged" in capfd.readouterr().err


def test_one_that_diverges_again_from_there_goes_one_checkpoint_further_back(
    tmp_path: Path,
) -> None:
    """The newest state may be the cause: an update that was absurd, but not absurd enough."""
    diverged_after(tmp_path, 3)
    assert json.loads((tmp_path / BEFORE).read_text())["round"] == 2
    for expected in (3, 2):
        with RunFolder(tmp_path, SPEC, {}) as held:
            assert held.reopen() == expected
        assert resumed_at(tmp_path) == expected
        diverged_after(tmp_path, expected)
    assert len(load_run(tmp_path).environment["reopened"]) == 2


def test_one_that_diverged_in_its_first_round_starts_over(tmp_path: Path) -> None:
    diverged_after(tmp_path, 0)
    with RunFolder(tmp_path, SPEC, {}) as held:
        assert held.reopen() == 0
        assert held.reopen() is None
    assert resumed_at(tmp_path) == 0


def test_a_state_that_is_not_finite_is_never_a_checkpoint(tmp_path: Path) -> None:
    diverged_after(tmp_path, 4, {3: float("nan"), 4: float("inf")})
    assert json.loads((tmp_path / NEWEST).read_text())["round"] == 2
    with RunFolder(tmp_path, SPEC, {}) as held:
        assert held.reopen() == 2
    assert resumed_at(tmp_path) == 2
    assert len(load_run(tmp_path).rows) == 2  # rows beyond the checkpoint are made again


def test_the_servers_own_state_counts_and_a_mask_does_not() -> None:
    good = state(1)
    assert is_finite(good)
    assert is_finite(replace(good, buffers=Buffers(torch.tensor([-torch.inf]), torch.empty(0))))
    assert not is_finite(replace(good, server={"second": torch.tensor([torch.inf])}))
    assert not is_finite(replace(good, broadcast={"control": torch.tensor([torch.nan])}))


def test_a_federation_with_other_rules_is_refused_in_words_for_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path, SPEC, {}, fingerprint=fingerprint_of_rules(fedadam())):
        pass
    diverged_after(tmp_path, 2)
    other = fingerprint_of_rules(replace(fedadam(), client=Prox()))
    with (
        pytest.raises(UsageError, match="the client rule differs"),
        RunFolder(tmp_path, SPEC, {}, fingerprint=other),
    ):
        pass
    with RunFolder(tmp_path, SPEC, {}, fingerprint=fingerprint_of_rules(fedadam())) as held:
        assert held.reopen() == 2


def test_a_simulated_run_is_reopened_only_where_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = tiny("fedexp", 30, {"local.lr": 5})
    first = execute_in(tmp_path, experiment)
    assert first.status == "diverged"
    again = execute_in(tmp_path, experiment)
    assert again.stored == len(first.rows)
    assert main(["resume", str(tmp_path), "--reopen", "--quiet"]) == 1
    assert f"resumes after round {len(first.rows)}" in capfd.readouterr().err
    stored = load_run(tmp_path)
    assert stored.environment["reopened"][0]["round"] == len(first.rows)
    assert untimed(stored.rows) == untimed(first.rows)  # the same numbers diverge again
    assert (tmp_path / RESULT).exists()
