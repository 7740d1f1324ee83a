"""Searches: what a trial scores, which trials are run, and the rule of thumb for eps.

A search resumes after it was killed or interrupted: no trial is lost, none repeated. The score is
the paper's: the training metric, averaged over the last ten rounds.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.experiment import Experiment, Row
from fedexp.plain import id_of
from fedexp.privacy import CentralPrivacy
from fedexp.runs.spec import Outcome
from fedexp.tasks import Goal
from fedexp.tuning.grids import points
from fedexp.tuning.results import Tuning
from fedexp.tuning.search import (
    EPS,
    EPS_VALUES,
    Search,
    Trial,
    TrialResult,
    goal_of,
    result_of,
    rule_of_thumb,
    score_of,
    window_of,
    worst_score,
)
from tests.helpers.tuning import SMALL, StartedTrials, scores, small_tune

LOSS = Goal("train_loss", higher=False)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ended(rows: list[Row], **how: Any) -> Outcome:
    return Outcome.of({}, rows, how)


def test_the_score_is_the_mean_of_the_last_ten_rounds() -> None:
    rows = [{"train_accuracy": 0.9, "test_accuracy": 1.0}] * 40
    rows += [{"train_accuracy": k / 100, "test_accuracy": 0.0} for k in range(10)]
    assert score_of(rows, "train_accuracy") == pytest.approx(0.045)
    assert window_of(50) == (41, 50)


def test_all_rounds_count_if_there_are_fewer_than_ten() -> None:
    assert score_of([{"train_loss": 1.0}, {"train_loss": 3.0}], "train_loss") == 2.0
    assert window_of(4) == (1, 4)


@pytest.mark.parametrize("rounds", [4, 10, 13, 50])
def test_a_trial_is_a_run_that_is_evaluated_in_its_window(rounds: int) -> None:
    base = Experiment("synthetic", "fedavg", rounds=rounds, options=SMALL)
    trial = Search.of(base, {"local.lr": [0.1]}).first
    rows = [record.to_json() for record in trial.records()]
    whole = [record.to_json() for record in base.with_options({"local.lr": 0.1}).records()]
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    losses = [row["train_loss"] for row in whole[-10:]]
    assert [row["train_loss"] for row in rows[-10:]] == losses  # bit for bit
    assert result_of(ended(rows), LOSS).score == score_of(whole, "train_loss")
    evaluated = [row["round"] for row in rows[:-10] if row["train_loss"] is not None]
    assert len(evaluated) <= 6  # a few before the window


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
@pytest.mark.parametrize("privacy", [None, CentralPrivacy(clip=1.0, delta=1e-5, epsilon=50.0)])
def test_a_trial_takes_the_steps_of_a_run_of_all_its_rounds(privacy: CentralPrivacy | None) -> None:
    """Schedules and the noise for an epsilon depend on the number of rounds."""
    options = {"local.lr_schedule": "cosine", "task.clients": "8", "local.lr": 0.1}
    run = Experiment("digits", "fedavg", rounds=14, cohort=4, options=options, privacy=privacy)
    trial = Search.of(run, {"server.lr": [1.0]}).first
    for one, other in zip(trial.records(), run.records(), strict=True):
        assert one.local_lr == other.local_lr
        assert torch.equal(one.state.params, other.state.params)


def test_a_metric_that_is_not_a_number_is_the_worst_score() -> None:
    rows = [{"test_f1": value, "server_lr": 1.0} for value in (0.5, None)]
    assert result_of(ended(rows), Goal("test_f1", higher=True)).score == -math.inf


def test_divergence_is_the_worst_score_and_no_error() -> None:
    (trial,) = small_tune(grid={"local.lr": [5.0]}, rounds=30).trials
    assert trial.result.diverged_at is not None
    assert trial.result.score == math.inf == worst_score(LOSS)
    assert worst_score(Goal("train_accuracy", higher=True)) == 0.0


def test_a_pruned_trial_is_judged_by_its_rounds_so_far() -> None:
    rows = [{"train_loss": 1.0, "server_lr": float(k), "test_loss": 2.0} for k in (1, 2, 3)]
    result = result_of(ended(rows, status="pruned"), LOSS)
    assert (result.pruned, result.score, result.step, result.test) == (True, math.inf, 2.0, 2.0)


def test_accuracy_if_the_task_has_one() -> None:
    assert goal_of(Experiment("digits").problem).metric == "train_accuracy"
    assert goal_of(Experiment("toy").problem) == LOSS


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy"])
def test_a_metric_of_the_users_own_is_judged_by_itself(name: str) -> None:
    data = {"x": np.ones((4, 2), np.float32), "y": np.zeros((4, 1), np.float32)}
    task = fx.supervised(
        "own",
        lambda: nn.Linear(2, 1),
        fx.Federation.from_ids(data, [0, 0, 1, 1]),
        data,
        loss=nn.functional.mse_loss,
        metrics={name: lambda outputs, targets: 0.5},
        goal=f"max:test_{name}",
    )
    assert str(goal_of(task)) == f"max:test_{name}"
    assert goal_of(replace(task, metric="test_loss", higher=None)) == LOSS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("protocol", ["paper", "free"])
def test_the_id_of_a_trial_is_that_of_its_run(algorithm: str, protocol: Any) -> None:
    """It is computed from the spec of another trial, without building the run."""
    search = Search.of(Experiment("digits", algorithm, rounds=5), protocol=protocol)
    for point in points(search.values)[:: 1 if protocol == "free" else 7]:
        assert id_of(search.spec_at(point)) == search.at(point).id


def test_the_id_of_a_trial_over_whole_numbers_infinity_and_epochs() -> None:
    grid: dict[str, list[float]] = {
        "eps": [0.1, math.inf],
        "epochs": [1, 2],
        "average_last": [1.0, 3.0],
    }
    search = Search.of(Experiment("digits", "fedexp", rounds=5), grid)
    for point in points(search.values):
        assert id_of(search.spec_at(point)) == search.at(point).id


GRID = {"server.lr": [1.0, 10.0], "local.lr": [0.1, 0.01, 5.0]}


@pytest.mark.parametrize("runs", ["runs", None])
def test_every_point_of_a_grid_is_tried_once(runs: str | None) -> None:
    first, second = StartedTrials(), StartedTrials()
    tuning = small_tune(grid=GRID, rounds=30, on_round=first, runs=runs)
    assert first.points == points(tuning.search.values)
    losses = [trial.result.score for trial in tuning.trials]
    assert losses == sorted(losses)
    assert [trial.result.diverged_at is None for trial in tuning.trials] == [True] * 4 + [False] * 2
    if runs is None:
        assert list(Path().iterdir()) == []
        return
    assert small_tune(grid=GRID, rounds=30, on_round=second).trials == tuning.trials
    assert second.points == []


def test_a_grid_takes_the_trials_of_another() -> None:
    before = small_tune(grid={"local.lr": [0.1, 0.01], "server.lr": [1.0]})
    started = StartedTrials()
    small_tune(grid={"server.lr": [1.0, 2.0], "local.lr": [0.1]}, on_round=started)
    assert started.points == [{"server.lr": 2.0, "local.lr": 0.1}]
    assert len(before.trials) == 2


def test_workers_give_the_scores_of_one_process() -> None:
    """Bit for bit, for every result of a grid; and diverged trials are no error."""
    started = StartedTrials()
    one = small_tune(grid=GRID, rounds=30, runs=None)
    two = small_tune(grid=GRID, rounds=30, jobs=2, on_round=started)
    assert scores(one.trials) == scores(two.trials)
    assert sorted(map(str, started.points)) == sorted(map(str, points(one.search.values)))


def test_an_interrupted_free_search_repeats_the_trial_it_was_in() -> None:
    interrupted, again = StartedTrials(interrupt_in_trial=3), StartedTrials()
    with pytest.raises(KeyboardInterrupt):
        small_tune(protocol="free", trials=8, on_round=interrupted)
    tuning = small_tune(protocol="free", trials=8, on_round=again)
    assert again.points[0] == interrupted.points[-1]
    assert len(again.points) == 6
    assert len({str(trial.point) for trial in tuning.trials}) == 8
    assert interrupted.points[0] == {"server.lr": 10.0, "local.lr": 0.1}  # the task's own
    assert len(small_tune(protocol="free", trials=10, on_round=again).trials) == 10
    alone = small_tune(protocol="free", trials=10, runs=None)
    assert scores(small_tune(protocol="free", trials=10).trials) == scores(alone.trials)


def test_a_file_of_asked_values_that_is_damaged_is_refused() -> None:
    small_tune(protocol="free", trials=2)
    (path,) = Path("runs/trials").glob("*/asked.json")
    for text in ("{", "7", '[{"server.lr": 1.0}]', '[{"server.lr": 1e9, "local.lr": "x"}]', "[3]"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"asked.json is damaged; remove runs/trials/"):
            small_tune(protocol="free", trials=2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_request_to_stop_ends_the_search_after_the_round(jobs: int) -> None:
    grid: Any = {"local.lr": [0.1, 0.01]}

    def stop(point: Any, row: Row) -> None:
        if row["round"] == 1 and not stopped:
            stopped.append(row)
            os.kill(os.getpid(), signal.SIGINT)

    stopped: list[Row] = []
    with pytest.raises(KeyboardInterrupt, match="stopped; the same call continues"):
        small_tune(grid=grid, rounds=400, jobs=jobs, on_round=stop)
    assert not list(Path("runs").rglob("result.json"))
    assert len(small_tune(grid=grid, rounds=400, jobs=jobs).trials) == 2


def results(values: Sequence[float], averages_from: int = 99) -> list[TrialResult]:
    return [TrialResult(value, averages=k >= averages_from) for k, value in enumerate(values)]


def test_values_start_at_a_thousandth_and_rise_by_half_decades() -> None:
    assert EPS_VALUES[:3] == (1e-3, 10**-2.5, 1e-2)
    assert EPS_VALUES[-1] == 10


@pytest.mark.parametrize(
    ("values", "averages_from", "higher", "chosen", "tried", "why"),
    [
        ([0.5, 0.6, 0.6, 0.7, 0.65, 0.9, 0.9], 99, True, 3, 5, "drop"),
        ([3.0, 2.0, 2.5, 1.0], 99, False, 1, 3, "drop"),  # a loss drops if it rises
        ([0.5] * 9, 4, True, 4, 5, "average"),  # a larger eps changes nothing
        ([k / 10 for k in range(9)], 99, True, 8, 9, "edge"),
        ([0.0, 0.8, 0.7], 99, True, 1, 3, "drop"),  # the first one has diverged
        ([0.5, 0.6], 99, True, 1, 2, ""),
        ([], 99, True, 0, 0, ""),
    ],
)
def test_the_rule_of_thumb(
    values: list[float], averages_from: int, higher: bool, chosen: int, tried: int, why: str
) -> None:
    choice = rule_of_thumb(results(values, averages_from), higher)
    assert (choice.eps, choice.tried, choice.ended) == (EPS_VALUES[chosen], tried, why)


@pytest.mark.parametrize(
    ("values", "averages_from", "end"),
    [
        ([0.5, 0.6, 0.55], 99, "is 60.00% and drops to 55.00% at 0.01"),
        ([0.6, 0.5], 99, "drops to 50.00% at 0.00316 (smaller values are not part of the rule)"),
        ([0.6], 0, "every step size is 1 from here on: larger eps is FedAvg as well"),
        ([0.6] * 9, 99, "has not dropped up to here, the largest value tried"),
    ],
)
def test_the_result_in_one_line(values: list[float], averages_from: int, end: str) -> None:
    search = Search.of(Experiment("digits", "fedexp"), protocol="epsilon")
    tried = zip(EPS_VALUES, results(values, averages_from), strict=False)
    tuning = Tuning(search, [Trial({EPS: eps}, result) for eps, result in tried])
    line = tuning.explanation
    assert line.startswith(f"eps {tuning.best[EPS]:.3g}: training accuracy (mean of rounds 41 to ")
    assert line.endswith(end)
    assert "\n" not in line


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_rule_of_thumb_on_digits(jobs: int) -> None:
    """It ends with a drop or an average, and runs no trial twice."""
    first, again = StartedTrials(), StartedTrials()
    settings: Any = {"protocol": "epsilon", "rounds": 12, "jobs": jobs}
    tuning = fx.tune("digits", "fedexp", **settings, on_round=first)
    values = [trial.point[EPS] for trial in tuning.trials]
    assert values == list(EPS_VALUES[: len(values)])
    assert len(values) <= len(first.points) < len(values) + jobs
    reached = [trial.result.score for trial in tuning.trials]
    place = values.index(tuning.best[EPS])
    assert reached[: place + 1] == sorted(reached[: place + 1])
    assert tuning.choice.ended == "average" or reached[-1] < reached[place] == tuning.score
    steps = [trial.result.step or 0.0 for trial in tuning.trials]
    assert steps[-1] < steps[0]  # a larger eps lowers the step size
    assert fx.tune("digits", "fedexp", **settings, on_round=again).trials == tuning.trials
    assert again.points == []


def test_only_algorithms_that_extrapolate_have_an_eps() -> None:
    with pytest.raises(UsageError, match="fedavg has no eps"):
        small_tune("fedavg", protocol="epsilon")


def test_an_error_in_a_worker_ends_the_search() -> None:
    """A run folder that holds something else is refused there, with its own error."""
    first = small_tune(grid={"local.lr": [0.1]}).trials[0]
    assert first.folder is not None
    (first.folder / "result.json").unlink()
    (first.folder / "spec.toml").write_text("format = 2")
    with pytest.raises(UsageError, match=r"spec\.toml has been changed since the run began"):
        small_tune(grid={"local.lr": [0.1, 0.2]}, jobs=2)
