"""Damaged and forged SQLite files of a tuning study: one error line, and no lost trials."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fedexp.tune.store import Trial, TrialResult, open_study
from tests.fuzz.hostile import VALUES, Files, fuzz, harmless, mutated

TERMS: dict[str, Any] = {"task": "toy", "values": {"server.lr": [0.1, 1.0]}}
GRID = {"server.lr": (0.1, 1.0)}
ATTRIBUTES = ("study_user_attributes", "trial_user_attributes")


def tried(path: Path) -> list[Trial]:
    with open_study(path, "toy fedavg paper", TERMS, GRID, True, 0) as store:
        return store.trials()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = tmp_path_factory.mktemp("study") / "study.sqlite"
    with open_study(path, "toy fedavg paper", TERMS, GRID, True, 0) as store:
        for number, scored in enumerate((TrialResult(0.5), TrialResult(0.25, diverged_at=3))):
            assert store.acquire(number)
            store.add(number, {"server.lr": GRID["server.lr"][number]}, scored)
    return Files({"study": path.read_bytes()})


@fuzz(6)
def test_damaged_studies(
    study: Files, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.sqlite"
    path.write_bytes(mutated(draw, *study.values()))
    found = harmless(lambda: tried(path), writes=True)
    assert isinstance(found, str) or all(isinstance(each, Trial) for each in found)


@fuzz(8)
def test_forged_studies(
    study: Files, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    """Attributes hold JSON, which may be anything."""
    path = tmp_path_factory.getbasetemp() / "forged.sqlite"
    path.write_bytes(study["study"])
    value = draw.choice([*map(json.dumps, VALUES), "", "{", '{"pruned": "x", "y": 1}'])
    with closing(sqlite3.connect(path)) as base:
        kind = draw.choice(["attribute", "value", "state"])
        if kind == "attribute":
            base.execute(f"update {draw.choice(ATTRIBUTES)} set value_json = ?", (value,))
        elif kind == "value":
            base.execute("update trial_params set param_value = ?", (draw.choice([7, -1, "x"]),))
        else:
            base.execute("update trial_values set value = ?", (draw.choice(["x", 1e308, -1]),))
        base.commit()
    found = harmless(lambda: tried(path), writes=True)
    assert isinstance(found, str) or all(isinstance(each, Trial) for each in found)
