"""Damaged and forged trials of a search: one error line, or all trials."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

import fedexp as fx
from fedexp.tuning.search import Trial
from tests.fuzz.hostile import Files, contents, forged, fuzz, harmless, mutated

SEARCHES: dict[str, dict[str, Any]] = {
    "paper": {"grid": {"server.lr": [0.5, 1.0]}},
    "free": {"protocol": "free", "trials": 2},
}


def tune(protocol: str, root: Path) -> list[Trial]:
    return fx.tune("toy", "fedavg", rounds=2, runs=root, **SEARCHES[protocol]).trials


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of finished searches."""
    folder = tmp_path_factory.mktemp("searches")
    for name in SEARCHES:
        assert len(tune(name, folder / name)) == 2
    return {name: contents(folder / name) for name in SEARCHES}


@fuzz(40)
def test_damaged_trials(
    searches: dict[str, Files], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    """Trials that are not finished any more are run again."""
    protocol = draw.choice(sorted(searches))
    files = searches[protocol]
    name = draw.choice([name for name in sorted(files) if not name.endswith(".lock")])
    damaged = mutated(draw, files[name])
    if name.endswith(".json") and draw.random() < 0.5:
        damaged = json.dumps(forged(draw, json.loads(files[name]))).encode()
    root = tmp_path_factory.getbasetemp() / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    for other, data in {**files, name: damaged}.items():
        (root / other).parent.mkdir(parents=True, exist_ok=True)
        (root / other).write_bytes(data)
    trials = harmless(lambda: tune(protocol, root), writes=True)
    assert isinstance(trials, str) or all(isinstance(trial, Trial) for trial in trials)
