"""`fx.tune` over tasks and algorithms of a user's own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pytest

import fedexp as fx
from fedexp.errors import DataNote, UsageError
from fedexp.tasks.metrics import as_metrics

UNTYPED: Any = fx  # for calls that mypy refuses
pytestmark = pytest.mark.usefixtures("study")


def test_a_search_without_a_score_has_no_best(study: Any) -> None:
    metrics = as_metrics({"never": lambda outputs, targets: math.inf})
    task = replace(study.task, metrics=metrics, metric="test_never", higher=True)
    with pytest.warns(DataNote, match="test_never is infinite"):
        tuned = fx.tune(task, "fedavg", {"local.lr": [0.1, 0.2]}, rounds=3)
    with pytest.raises(fx.UsageError, match="no trial has a finite test_never, so none is the"):
        tuned.best  # noqa: B018


@pytest.mark.parametrize(
    ("algorithm", "unit"), [(fx.fedexp(), "relative"), ("fedexp", "absolute")], ids=str
)
def test_an_eps_has_the_unit_of_the_algorithm_and_a_name_that_of_its_mode(
    study: Any, algorithm: Any, unit: str
) -> None:
    tuned = fx.tune(study.task, algorithm, {"eps": [0.2]}, rounds=3)
    again = fx.run(study.task, algorithm, options=tuned.best, rounds=3, runs=None)
    assert again.experiment.setup.options()["server.eps_mode"] == unit
    assert tuned.score == pytest.approx(np.mean([row["train_accuracy"] for row in again.rows]))


def test_a_search_over_a_grid_of_the_users(study: Any, tmp_path: Path) -> None:
    grid = {"lr": [0.001, 0.05], "factor": [0.5, 1.0]}
    tuned = fx.tune(study.task, study.mine, grid, rounds=3)
    assert len(tuned.trials) == 4
    assert tuned.best.keys() == {"server.lr", "client.factor"}
    assert tuned.score == max(trial.result.score for trial in tuned.trials)
    assert tuned.table().splitlines()[2].split()[0] == "sign"
    assert isinstance(tuned.frame(), pandas.DataFrame)
    assert tuned.plot(tmp_path / "tune.png").exists()
    with pytest.raises(UsageError, match="takes numbers; set 'adam' with options="):
        fx.tune(study.task, "fedavg", {"local.optimizer": cast(Any, ["adam"])})
    best = fx.run(study.task, study.mine, options=tuned.best, runs=None)
    assert best.experiment.setup.options()["server.lr"] == tuned.best["server.lr"]
    written = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("records.jsonl")}
    assert len(written) == 4
    assert fx.tune(study.task, study.mine, grid, rounds=3).best == tuned.best
    assert written == {path: path.stat().st_mtime_ns for path in written}  # nothing is run again


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda s: fx.tune(s.task, "fedexp", {"epps": [1.0]}), "unknown option of fedexp 'epps'"),
        (lambda s: fx.tune(s.task, "fedexp", {}), "the grid is empty"),
        (
            lambda s: UNTYPED.tune(s.task, metric="x"),
            "unknown argument 'metric'; choose from",
        ),
        (lambda s: fx.tune(s.task, stop_at=0.9), "trials run to their end; leave stop_at out"),
        (lambda s: fx.tune(s.task, evaluate_every=2), "leave evaluate_every out"),
        (
            lambda s: UNTYPED.tune(s.task, "fedexp", {"eps": 0.1}),
            "0.1 for eps; give a list of values",
        ),
    ],
)
def test_mistakes_get_one_line_that_names_the_remedy(study: Any, call: Any, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        call(study)
    assert line in str(raised.value)
