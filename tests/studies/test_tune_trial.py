"""A trial's score is the paper's: the training metric, averaged over the last ten rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedexp.runs.spec import Spec
from fedexp.tune.trial import Row, metric_of, run_trial, score_of, window_of, worst
from tests.studies.problems import small_study


def test_the_score_is_the_mean_of_the_last_ten_rounds() -> None:
    rows = [{"train_accuracy": 0.9, "test_accuracy": 1.0}] * 40
    rows += [{"train_accuracy": k / 100, "test_accuracy": 0.0} for k in range(10)]
    assert score_of(rows, "train_accuracy") == pytest.approx(0.045)
    assert window_of(50) == (41, 50)


def test_fewer_rounds_than_ten_all_count() -> None:
    assert score_of([{"train_loss": 1.0}, {"train_loss": 3.0}], "train_loss") == 2.0
    assert window_of(4) == (1, 4)


@pytest.mark.parametrize("rounds", [4, 10, 13, 50])
def test_a_trial_is_an_ordinary_run_evaluated_in_its_window(tmp_path: Path, rounds: int) -> None:
    spec = small_study(tmp_path / "s.db", rounds=rounds).run.spec
    rows: list[Row] = []

    def keep(row: Row) -> bool:
        rows.append(row)
        return True

    scored = run_trial(spec, keep)
    whole = [record.to_json() for record in spec.prepare().records()]
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    losses = [row["train_loss"] for row in whole[-10:]]
    assert [row["train_loss"] for row in rows[-10:]] == losses  # bit for bit
    assert scored.score == score_of(whole, "train_loss")
    evaluated = [row["round"] for row in rows[:-10] if row["train_loss"] is not None]
    assert len(evaluated) <= 6  # a few glances on the way


def test_divergence_is_the_worst_score_and_no_error(tmp_path: Path) -> None:
    spec = small_study(tmp_path / "s.db", rounds=30).run.spec
    wild = replace(spec, options=(*spec.options, ("local.lr", "5")))
    scored = run_trial(wild, lambda row: True)
    assert scored.diverged_at is not None
    assert scored.score == math.inf == worst("train_loss")
    assert worst("train_accuracy") == 0.0


def test_a_trial_can_be_given_up(tmp_path: Path) -> None:
    spec = small_study(tmp_path / "s.db", rounds=30).run.spec
    seen: list[int] = []

    def until_three(row: Row) -> bool:
        seen.append(row["round"])
        return bool(row["round"] < 3)

    assert run_trial(spec, until_three).pruned
    assert seen == [1, 2, 3]


def test_accuracy_where_there_is_one() -> None:
    assert metric_of(Spec("digits", "fedavg").prepare().task) == "train_accuracy"
    assert metric_of(Spec("toy", "fedavg").prepare().task) == "train_loss"
