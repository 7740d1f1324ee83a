"""Damaged and forged trials of a search: one error line, or all trials."""

from __future__ import annotations

import json
import shutil
from random import Random

import pytest

from fedexp.experiment import Experiment
from fedexp.tuning.search import Search, Trial, tune
from tests.fuzz.hostile import Files, contents, forged, fuzz, harmless, mutated

SEARCHES = {
    "paper": Search.of(Experiment("toy", "fedavg", rounds=2), {"server.lr": [0.5, 1.0]}),
    "free": Search.of(Experiment("toy", "fedavg", rounds=2), protocol="free", trials=2),
}


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of finished searches."""
    folder = tmp_path_factory.mktemp("searches")
    for name, search in SEARCHES.items():
        assert len(tune(search, folder / name)) == 2
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
    trials = harmless(lambda: tune(SEARCHES[protocol], root), writes=True)
    assert isinstance(trials, str) or all(isinstance(trial, Trial) for trial in trials)
