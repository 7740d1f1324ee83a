"""Runs with secure aggregation: the simulator's numbers, drop-outs and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.serverapp.strategy import Result

import fedexp as fx
from fedexp.errors import FedExPError, UsageError
from fedexp.flower import (
    FedAvg,
    FedExP,
    RuleStrategy,
    SecureAggregation,
    initial_arrays,
    report_client_id,
    secure_mod,
    simulated_train,
)
from fedexp.flower.simulated_client import to_arrays
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import Answer, FakeGrid, raises
from tests.flower.helpers.secure import at_stage
from tests.helpers.problems import classes_task, least_squares

SECURE = SecureAggregation(clip=20.0, extras_bound=20.0)


def grid_of(task: Task, seed: int = 0) -> FakeGrid:
    """One line more than a plain app: the mod."""
    app = ClientApp(mods=[secure_mod])
    app.train()(simulated_train(task, seed=seed))
    report_client_id(app)
    return FakeGrid(app, task.train.clients)


def run(
    strategy: RuleStrategy, task: Task, grid: FakeGrid | None = None, rounds: int = 4
) -> Result:
    return strategy.start(grid or grid_of(task), initial_arrays(task), rounds, timeout=60)


@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize(
    "algorithm",
    [fx.fedexp(eps=1e-3, max_step=9), fx.scaffold_exp(eps=1e-3, max_step=9), fx.fedadam()],
    ids=lambda a: a.name,
)
@pytest.mark.parametrize(("problem", "rounds"), [("BatchNorm", 2), ("least squares", 4)])
def test_a_secure_run_is_the_simulators(
    problem: str, rounds: int, algorithm: fx.Algorithm, cohort: int | None
) -> None:
    """Two rounds of BatchNorm: of batches of four, it makes 1e-8 a hundred times more a round."""
    task = least_squares(clients=4) if problem == "least squares" else classes_task()
    strategy = RuleStrategy((cohort or 4) / 4, 0.0, algorithm=algorithm, secure=SECURE)
    result = run(strategy, task, rounds=rounds)
    records = list(fx.simulate(task, algorithm, rounds, cohort, engine="loop"))
    for record in records:
        found = result.train_metrics_clientapp[record.round]
        assert found["server_lr"] == pytest.approx(record.server_lr, rel=1e-5)
        assert found["clients"] == record.clients
        assert found["clipped"] == 0
    expected = to_arrays(task, *records[-1].state.output())
    for name, array in result.arrays.items():
        ours, theirs = (torch.from_numpy(a.numpy()) for a in (array, expected[name]))
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5), name


def test_a_run_continues_when_clients_drop_out_and_counts_them(tmp_path: Path) -> None:
    task = classes_task(sizes=(10, 6, 14, 7, 8))
    grid = grid_of(task)
    grid.nodes[1].fault = at_stage(Stage.SHARE_KEYS, raises)
    result = run(FedExP(fraction_evaluate=0.0, secure=SECURE), task, grid, rounds=2)
    for metrics in result.train_metrics_clientapp.values():
        assert (metrics["clients"], metrics["dropped"]) == (4, 1)


def test_a_client_without_which_no_sum_is_possible_is_not_passed_over() -> None:
    """It was silent once, and of three a sum needs all: the next round asks it again."""
    task = least_squares(clients=3)
    grid, received = grid_of(task), list[Message]()

    def silent_once(message: Message, answer: Answer) -> Message | None:
        received.append(message)
        return answer() if received[0].metadata.message_id != message.metadata.message_id else None

    grid.nodes[1].fault = silent_once
    strategy = FedExP(fraction_evaluate=0.0, secure=SECURE)
    rows = strategy.start(grid, initial_arrays(task), 2, timeout=1).train_metrics_clientapp
    assert [rows[k]["clients"] for k in (1, 2)] == [0, 3]
    assert rows[1]["unanswered"] == 1


def test_a_run_without_sums_ends_with_one_line() -> None:
    task = least_squares(clients=4)
    grid = grid_of(task)
    for node in grid.nodes[:2]:
        node.fault = at_stage(Stage.COLLECT_MASKED_VECTORS, raises)
    with pytest.raises(FedExPError, match="no usable reply in 3 rounds"):
        run(FedExP(fraction_evaluate=0.0, secure=SECURE), task, grid)


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_with_a_bound_the_clip_of_a_secure_run_is_that_of_the_simulator() -> None:
    """Both follow one bit per client; the simulator by a private run with hardly any noise."""
    task, algorithm = least_squares(clients=4), fx.fedexp(bound=2.0, max_step=9)
    strategy = RuleStrategy(1.0, 0.0, algorithm=algorithm, secure=SecureAggregation(clip=3.0))
    result = run(strategy, task, rounds=8)
    privacy = CentralPrivacy(clip=3.0, delta=1e-5, noise_multiplier=1e-9, norm_weight=1.0)
    records = list(fx.simulate(task, algorithm, 8, privacy=privacy, engine="loop"))
    rows = result.train_metrics_clientapp
    for record in records:
        assert rows[record.round]["clip"] == pytest.approx(record.metrics["clip"], rel=1e-5)
        assert rows[record.round]["server_lr"] == pytest.approx(record.server_lr, rel=1e-4)
        assert not {"clipped", "median_norm", "longest_norm"} & rows[record.round].keys()
    assert {rows[k]["longer"] for k in rows} >= {0.0}
    assert rows[8]["clip"] != rows[1]["clip"] == 3.0


@pytest.mark.parametrize("bound", [None, 2.0])
def test_a_secure_run_resumes_to_the_same_bits(tmp_path: Path, bound: float | None) -> None:
    task = classes_task()
    options: Any = {"fraction_evaluate": 0.0, "secure": SECURE, "bound": bound}
    strategy = FedExP(**options, checkpoint=tmp_path / "whole")
    whole = run(strategy, task)

    class Killed(BaseException): ...

    def killed_in_round_3(message: Message) -> None:
        config = message.content.config_records.get("config", ConfigRecord())
        if config.get("server-round") == 3:
            raise Killed

    grid = grid_of(task)
    grid.taps.append(killed_in_round_3)
    part = FedExP(**options, checkpoint=tmp_path / "part")
    with pytest.raises(Killed):
        run(part, task, grid)
    again = FedExP(**options, checkpoint=tmp_path / "part")
    resumed = run(again, task)
    for name, array in whole.arrays.items():
        assert (array.numpy() == resumed.arrays[name].numpy()).all()
    curves = [load_run(tmp_path / k).outcome().curve("server_lr") for k in ("whole", "part")]
    assert curves[0].tolist() == curves[1].tolist()
    other = SecureAggregation(clip=1.0, extras_bound=20.0)
    with pytest.raises(UsageError):
        run(FedExP(**{**options, "secure": other}, checkpoint=tmp_path / "part"), task)


def test_what_a_secure_sum_cannot_do_is_refused_before_anybody_trains() -> None:
    task = classes_task()
    grid = grid_of(task)
    with pytest.raises(UsageError, match="weighting='uniform'"):
        run(FedAvg(secure=SECURE, weighting="num-examples"), task, grid)
    with pytest.raises(UsageError, match="set extras_bound"):
        run(FedAvg(secure=SecureAggregation(clip=1.0)), task, grid)
    with pytest.raises(UsageError, match="needs at least 3 clients per round"):
        run(FedAvg(fraction_train=0.5, secure=SECURE), task, grid)
    assert "train" not in {kind for kind, _ in grid.sent}


def test_a_client_without_the_mod_is_dropped_and_reveals_nothing(lines: list[str]) -> None:
    task = least_squares(clients=4)
    app = ClientApp()
    trained: list[int] = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(1)
        return simulated_train(task)(message, context)

    with pytest.raises(FedExPError, match="no usable reply"):
        run(FedExP(fraction_evaluate=0.0, secure=SECURE), task, FakeGrid(app, 4))
    assert len(trained) == 3 * 4  # only their keys were requested: no model was sent
    assert sum("add mods=[secure_mod] to its ClientApp" in line for line in lines) == 3 * 4


def test_steps_of_secure_runs_are_bounded_unless_the_rule_has_a_bound() -> None:
    """A client can lie about its squared norm, of which the server sees the sum only."""
    for rule, most in ((fx.fedexp(), 2.0), (fx.fedexp(max_step=5.0), 5.0), (fx.fedavg(), None)):
        settings = RuleStrategy(algorithm=rule, secure=SECURE, fraction_evaluate=0.0).settings
        assert vars(settings.algorithm.server).get("max_step") == most
    assert vars(RuleStrategy(algorithm=fx.fedexp()).settings.algorithm.server)["max_step"] > 1e9
