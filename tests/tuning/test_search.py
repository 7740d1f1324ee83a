"""Searches: what a trial scores, which trials are run, and the rule of thumb for eps.

A search resumes after it was killed or interrupted: no trial is lost, none repeated. The score is
the paper's: the training metric, averaged over the last ten rounds.
"""

from __future__ import annotations

import math
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.experiment import Row
from fedexp.privacy import CentralPrivacy
from fedexp.runs import RunInterrupted, execute
from fedexp.runs.spec import Spec
from fedexp.tasks import Goal
from fedexp.tuning.grids import Point, points
from fedexp.tuning.search import (
    EPS,
    EPS_VALUES,
    OnRow,
    Study,
    TrialRunner,
    epsilon_values,
    explain,
    goal_of,
    prepare_trial,
    raise_until_drop,
    result_of,
    score_of,
    tune,
    tune_epsilon,
    window_of,
    worst_score,
)
from fedexp.tuning.store import TrialResult
from tests.helpers.tuning import OPTIONS, StartedTrials, small_study

LOSS = Goal("train_loss", higher=False)


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
    assert result_of(rows, LOSS).score == score_of(whole, "train_loss")
    evaluated = [row["round"] for row in rows[:-10] if row["train_loss"] is not None]
    assert len(evaluated) <= 6  # a few before the window


@pytest.mark.parametrize("privacy", [None, CentralPrivacy(clip=1.0, delta=1e-5, epsilon=50.0)])
def test_a_trial_takes_the_steps_of_a_run_of_all_its_rounds(privacy: CentralPrivacy | None) -> None:
    """Schedules and the noise for an epsilon depend on the number of rounds."""
    options = (("local.lr_schedule", "cosine"), ("task.clients", "8"))
    spec = Spec("digits", "fedavg", rounds=14, cohort=4, options=options, privacy=privacy)
    trial, run = prepare_trial(spec).records(), spec.prepare().records()
    for one, other in zip(trial, run, strict=True):
        assert one.local_lr == other.local_lr
        assert torch.equal(one.state.params, other.state.params)


def test_a_metric_that_is_not_a_number_is_the_worst_score() -> None:
    rows = [{"test_f1": value, "server_lr": 1.0} for value in (0.5, None)]
    assert result_of(rows, Goal("test_f1", higher=True)).score == -math.inf


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
    assert trial.result.score == math.inf == worst_score(LOSS)
    assert worst_score(Goal("train_accuracy", higher=True)) == 0.0


def test_a_pruned_trial_is_judged_by_its_rounds_so_far() -> None:
    rows = [{"train_loss": 1.0, "server_lr": float(k), "test_loss": 2.0} for k in (1, 2, 3)]
    result = result_of(rows, LOSS, pruned=True)
    assert (result.pruned, result.score, result.step, result.test) == (True, math.inf, 2.0, 2.0)


def test_accuracy_if_the_task_has_one() -> None:
    assert goal_of(Spec("digits", "fedavg").prepare().task).metric == "train_accuracy"
    assert goal_of(Spec("toy", "fedavg").prepare().task) == LOSS


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy"])
def test_a_metric_of_the_users_own_is_judged_by_itself(name: str) -> None:
    data = {"x": np.ones((4, 2), np.float32), "y": np.zeros((4, 1), np.float32)}
    own = fx.supervised(
        "own",
        lambda: nn.Linear(2, 1),
        fx.Federation.from_ids(data, [0, 0, 1, 1]),
        data,
        loss=nn.functional.mse_loss,
        metrics={name: lambda outputs, targets: 0.5},
        goal=f"max:test_{name}",
    )
    assert str(goal_of(own)) == f"max:test_{name}"
    assert goal_of(replace(own, metric="test_loss", higher=None)) == LOSS


def stored_points(study: Study) -> list[Point]:
    with study.open() as store:
        return [each.point for each in store.trials()]


def test_every_point_of_a_grid_is_tried_once(tmp_path: Path) -> None:
    values = {"server.lr": (1.0, 10.0), "local.lr": (0.1, 0.01, 5.0)}
    study = small_study(tmp_path / "with space" / "s.db", values=values, rounds=30)
    first, second = StartedTrials(), StartedTrials()
    trials = tune(study, TrialRunner(progress=first))
    assert first.points == points(study.values)
    assert tune(study, TrialRunner(progress=second)) == trials
    assert second.points == []
    scores = [each.result.score for each in trials]
    assert scores == sorted(scores)
    assert trials[0].point in points(study.values)
    assert [each.result.diverged_at is None for each in trials] == [True] * 4 + [False] * 2


def test_workers_give_the_scores_of_one_process(tmp_path: Path) -> None:
    """Bit for bit, for every result of a grid; and diverged trials are no error."""
    values = {"server.lr": (1.0, 10.0), "local.lr": (0.1, 0.01, 5.0)}
    one, two = (small_study(tmp_path / f"{k}.db", values=values, rounds=30) for k in (1, 2))
    started = StartedTrials()
    assert tune(one) == tune(two, TrialRunner(jobs=2, progress=started))
    assert sorted(map(str, started.points)) == sorted(map(str, points(values)))


def test_a_killed_grid_search_resumes(tmp_path: Path) -> None:
    """SIGKILL with two workers: they exit as well; every point is there once, the best the same."""
    study = small_study(tmp_path / "killed.db", rounds=60)
    command = [sys.executable, "-m", "fedexp", "tune", "synthetic", "--algorithm", "fedavg"]
    command += ["--rounds", "60", "--jobs", "2", "--study", str(study.path), *OPTIONS]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while _stored(study.path) < 4:
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.02)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _stored(study.path)
    assert before < study.size, "nothing was left to do"
    started = StartedTrials()
    trials = tune(study, TrialRunner(progress=started))
    assert started.left == len(started.points) == study.size - before
    assert sorted(map(str, stored_points(study))) == sorted(map(str, points(study.values)))
    assert tune(replace(study, path=tmp_path / "whole.db")) == trials
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def _stored(path: Path) -> int:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            query = "select count(*) from trials where state = 'COMPLETE'"
            return int(database.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # not created yet


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_an_interrupted_free_search_repeats_the_trial_it_was_in(tmp_path: Path) -> None:
    ranges = {"server.lr": (1.0, 30.0), "local.lr": (0.01, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=8)
    interrupted, again = StartedTrials(interrupt_in_trial=3), StartedTrials()
    with pytest.raises(KeyboardInterrupt):
        tune(study, TrialRunner(progress=interrupted))
    assert len(stored_points(study)) == 2
    trials = tune(study, TrialRunner(progress=again))
    assert again.points[0] == interrupted.points[-1]
    assert len(trials) == 8
    assert len({str(each.point) for each in trials}) == 8
    assert interrupted.points[0] == {
        "server.lr": 10.0,
        "local.lr": 0.1,
    }  # the task's own come first
    more = tune(replace(study, trials=10), TrialRunner(progress=again))
    assert len(more) == 10


def test_a_free_search_prunes(tmp_path: Path) -> None:
    ranges = {"server.lr": (0.003, 30.0), "local.lr": (0.001, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=ranges, trials=16, rounds=24)
    trials = tune(study)
    assert len(trials) == 16
    assert any(each.result.pruned for each in trials)
    assert not trials[0].result.pruned
    for each in trials:
        assert 0.003 <= each.point["server.lr"] <= 30
        assert 0.001 <= each.point["local.lr"] <= 0.1


def test_a_request_to_stop_ends_the_search_after_the_round(tmp_path: Path) -> None:
    study = small_study(tmp_path / "s.db", values={"local.lr": (0.1, 0.01)}, rounds=400)
    started = StartedTrials()
    runner = TrialRunner(progress=started, stop=lambda: bool(started.points))
    with pytest.raises(RunInterrupted):
        tune(study, runner)
    with study.open() as store:
        assert store.trials() == []
    assert len(tune(study)) == 2


class FakeScores:
    """Scores by the position of a value; records the values that it was called with."""

    def __init__(self, scores: Sequence[float], averages_from: int = 99) -> None:
        self.values: list[float] = []
        self._scores, self._averages = scores, averages_from

    def __call__(self, values: Sequence[float]) -> list[TrialResult]:
        self.values += values
        positions = [EPS_VALUES.index(value) for value in values]
        return [TrialResult(self._scores[k], averages=k >= self._averages) for k in positions]


def test_values_start_at_a_thousandth_and_rise_by_half_decades() -> None:
    assert EPS_VALUES[:3] == (1e-3, 10**-2.5, 1e-2)
    assert EPS_VALUES[-1] == 10


@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_it_stops_at_the_first_drop(at_a_time: int) -> None:
    fake = FakeScores([0.5, 0.6, 0.6, 0.7, 0.65, 0.9, 0.9, 0.9, 0.9])
    found = raise_until_drop(fake, higher=True, at_a_time=at_a_time)
    assert (found.chosen, found.ended) == (EPS_VALUES[3], "drop")
    assert [eps for eps, _ in found.tried] == list(EPS_VALUES[:5])
    assert len(fake.values) < 5 + at_a_time


def test_a_loss_drops_if_it_rises() -> None:
    found = raise_until_drop(
        FakeScores([3.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), higher=False
    )
    assert (found.chosen, found.ended) == (EPS_VALUES[1], "drop")


def test_it_stops_where_a_larger_eps_changes_nothing() -> None:
    found = raise_until_drop(FakeScores([0.5] * 9, averages_from=4), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (EPS_VALUES[4], "average", 5)


def test_it_stops_at_the_edge() -> None:
    found = raise_until_drop(FakeScores([k / 10 for k in range(9)]), higher=True)
    assert (found.chosen, found.ended, len(found.tried)) == (10, "edge", 9)


def test_a_value_that_diverges_is_not_chosen() -> None:
    """A trial that diverged has the worst score, so that the next value is no drop."""
    fake = FakeScores([0.0, 0.8, 0.7, 0, 0, 0, 0, 0, 0])
    assert raise_until_drop(fake, higher=True).chosen == EPS_VALUES[1]


@pytest.mark.parametrize(
    ("scores", "averages", "end"),
    [
        ([0.5, 0.6, 0.55], 99, "is 60.00% and drops to 55.00% at 0.01"),
        ([0.6, 0.5], 99, "drops to 50.00% at 0.00316 (smaller values are not part of the rule)"),
        ([0.6], 0, "every step size is 1 from here on: larger eps is FedAvg as well"),
        ([0.6] * 9, 99, "has not dropped up to here, the largest value tried"),
    ],
)
def test_the_result_in_one_line(
    scores: list[float], averages: int, end: str, tmp_path: Path
) -> None:
    found = raise_until_drop(FakeScores(scores, averages), higher=True)
    run = Spec("digits", "fedexp", rounds=50).prepare()
    line = explain(found, Study(run, "epsilon", {EPS: EPS_VALUES}, tmp_path / "s.db"))
    assert line.startswith(f"eps {found.chosen:.3g}: training accuracy (mean of rounds 41 to 50)")
    assert line.endswith(end)
    assert "\n" not in line


def test_on_real_digits(tmp_path: Path) -> None:
    """It ends with a drop or an average, and runs no trial twice."""
    run = Spec("digits", "fedexp", rounds=12).prepare()
    study = Study(run, "epsilon", {EPS: EPS_VALUES}, tmp_path / "s.db")
    found = tune_epsilon(study)
    scores = [result.score for _, result in found.tried]
    place = [eps for eps, _ in found.tried].index(found.chosen)
    assert scores[: place + 1] == sorted(scores[: place + 1])
    assert found.ended in ("drop", "average")
    assert found.tried[-1][1].score < scores[place] or found.ended == "average"
    steps = [result.step for _, result in found.tried]
    assert steps[-1] is not None
    assert steps[0] is not None
    assert steps[-1] < steps[0]  # a larger eps lowers the step size
    assert tune_epsilon(study, TrialRunner(progress=_not_called)) == found


def test_only_algorithms_that_extrapolate_have_an_eps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fedavg has no eps"):
        epsilon_values(small_study(tmp_path / "s.db", "fedavg").run)


def _not_called(left: int) -> AbstractContextManager[OnRow]:
    raise AssertionError("all values were stored already")
