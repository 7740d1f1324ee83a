"""The values of the Shakespeare task are those of its search, and its page has the stored runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.results import search, shakespeare
from tools.results.archive import load_archive

from fedexp.tasks.recipe import RECIPES

FOLDER = Path("results/shakespeare")


def test_the_recipe_has_the_best_values_of_the_search() -> None:
    best = search.best_trials(search.load_search(FOLDER))
    tuned = RECIPES["shakespeare"]["tuned"]
    assert set(best) == {"fedavg", "fedexp", "scaffold", "fedadagrad", "fedadam"}
    for name, trial in best.items():
        assert tuned[name]["local.lr"] == pytest.approx(trial.local_lr, rel=1e-5)
        assert tuned[name][trial.option] == pytest.approx(trial.value, rel=1e-5)


def test_the_table_has_the_crossings_of_the_stored_curves() -> None:
    archive = load_archive(Path("results"))
    lines = shakespeare.runs_table(archive).splitlines()[2:]
    runs = [run for run in archive.runs if run.spec["task"] == "shakespeare"]
    assert len(lines) == len(runs) == 3
    for run in runs:
        assert len(run.rows) == 1200
        curve = {row["round"]: row["test_accuracy"] for row in run.rows}
        reached = [t for t, value in curve.items() if value is not None and value >= 0.55]
        last = f"{100 * run.rows[-1]['test_accuracy']:.2f} %"
        (line,) = [line for line in lines if last in line]
        assert f"| {min(reached)} (" in line
