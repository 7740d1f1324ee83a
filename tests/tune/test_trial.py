"""The score of a trial is the paper's: the training metric, averaged over the last ten rounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedexp.runs import execute
from fedexp.runs.files import Row
from fedexp.runs.spec import Spec
from fedexp.tune.search import tune
from fedexp.tune.trial import (
    metric_of,
    prepare_trial,
    result_of,
    score_of,
    window_of,
    worst_score,
)
from tests.helpers.tuning import small_study


def test_the_score_is_the_mean_of_the_last_ten_rounds() -> None:
    rows = [{"train_accuracy": 0.9, "test_accuracy": 1.0}] * 40
    rows += [{"train_accuracy": k / 100, "test_accuracy": 0.0} for k in range(10)]
    assert score_of(rows, "train_accuracy") == pytest.approx(0.045)
    assert window_of(50) == (41, 50)


def test_all_rounds_count_if_there_are_fewer_than_ten() -> None:
    assert score_of([{"train_loss": 1.0}, {"train_loss": 3.0}], "train_loss") == 2.0
    assert window_of(4) == (1, 4)


@pytest.mark.parametrize("rounds", [4, 10, 13, 50])
def test_a_trial_is_a_run_that_is_evaluated_in_its_window(tmp_path: Path, rounds: int) -> None:
    spec = small_study(tmp_path / "s.db", rounds=rounds).run.spec
    received: list[Row] = []
    rows = execute(spec, None, lambda spec, row: received.append(row), run=prepare_trial(spec)).rows
    assert received == rows
    whole = [record.to_json() for record in spec.prepare().records()]
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    losses = [row["train_loss"] for row in whole[-10:]]
    assert [row["train_loss"] for row in rows[-10:]] == losses  # bit for bit
    assert result_of(rows, "train_loss").score == score_of(whole, "train_loss")
    evaluated = [row["round"] for row in rows[:-10] if row["train_loss"] is not None]
    assert len(evaluated) <= 6  # a few before the window


def test_a_trial_resumes_from_any_state(tmp_path: Path) -> None:
    """From before the window and from inside it, with the same evaluations."""
    run = prepare_trial(small_study(tmp_path / "s.db", rounds=30).run.spec)
    records = list(run.records())
    for at in (7, 20, 25):
        again = [record.to_json()["train_loss"] for record in run.records(records[at - 1].state)]
        assert again == [record.to_json()["train_loss"] for record in records[at:]]


def test_divergence_is_the_worst_score_and_no_error(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (5.0,)}, rounds=30)
    (trial,) = tune(study)
    assert trial.result.diverged_at is not None
    assert trial.result.score == math.inf == worst_score("train_loss")
    assert worst_score("train_accuracy") == 0.0


def test_a_pruned_trial_is_judged_by_its_rounds_so_far() -> None:
    rows = [{"train_loss": 1.0, "server_lr": float(k), "test_loss": 2.0} for k in (1, 2, 3)]
    result = result_of(rows, "train_loss", pruned=True)
    assert (result.pruned, result.score, result.step, result.test) == (True, math.inf, 2.0, 2.0)


def test_accuracy_if_the_task_has_one() -> None:
    assert metric_of(Spec("digits", "fedavg").prepare().task) == "train_accuracy"
    assert metric_of(Spec("toy", "fedavg").prepare().task) == "train_loss"
