"""Hostile clients: bounds on what one reply adds, and a log that names its node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.flower import FedAvg, FedExP, Scaffold, SecureAggregation, initial_arrays
from fedexp.flower import replies as replies_module
from fedexp.flower.layout import ndarrays
from fedexp.flower.request import EXTRAS
from fedexp.privacy import LocalPrivacy
from tests.flower.helpers.fake_grid import FakeGrid, only, replies, with_array, with_metric
from tests.flower.helpers.plain_app import DIM, first_model, plain_app
from tests.flower.helpers.user_app import float64_task, simulated_app, uniform_strategy
from tests.helpers.problems import least_squares

BAD = 1  # the position of the hostile node
NODES = 6
ROUNDS = 4


def scaled(factor: float) -> Callable[[RecordDict], None]:
    """Return a change of a reply: its parameters times a factor (the model starts at zero)."""

    def change(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        arrays["w"] = Array((arrays["w"].numpy() * factor).astype(np.float32))

    return change


def attacked(
    change: Callable[[RecordDict], None], strategy: Any = None, rounds: Iterable[int] | None = None
) -> Any:
    """Train with one hostile node of six; every reply of it is changed."""
    grid = FakeGrid(plain_app(), NODES, faults={BAD: only(replies(change), rounds=rounds)})
    return (strategy or FedExP(bound=2.0)).start(grid, first_model(), ROUNDS)


def weights(result: Any) -> NDArray[Any]:
    return ndarrays(result.arrays)["w"]


@pytest.mark.parametrize("make", [fx.fedexp, fx.scaffold_exp, fx.fedadam])
def test_a_bound_clips_as_in_the_simulator(make: Any) -> None:
    task, algorithm = float64_task(), replace(make(), bound=1.0)
    records = list(fx.simulate(task, algorithm, ROUNDS, engine="loop"))
    result = uniform_strategy(algorithm).start(
        FakeGrid(simulated_app(task), 4), initial_arrays(task), ROUNDS
    )
    assert records[0].metrics["clipped"] >= 1
    for record in records:
        metrics = result.train_metrics_clientapp[record.round]
        for name in ("server_lr", "clipped", "median_norm", "longest_norm"):
            expected = record.server_lr if name == "server_lr" else record.metrics[name]
            assert metrics[name] == pytest.approx(expected, rel=1e-9), name


def test_updates_of_the_first_round_are_summed_again_from_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = attacked(scaled(1e6))
    monkeypatch.setattr(replies_module, "MAX_CHUNK", 2)
    in_parts = attacked(scaled(1e6))
    np.testing.assert_allclose(weights(in_parts), weights(whole), rtol=1e-6)


@pytest.mark.parametrize("factor", [1e6, -30.0])
def test_one_scaled_update_is_clipped_in_every_round_and_counted(factor: float) -> None:
    honest = FedExP(bound=2.0).start(FakeGrid(plain_app(), NODES), first_model(), ROUNDS)
    result = attacked(scaled(factor))
    distance = np.linalg.norm(weights(result) - weights(honest))
    assert distance < 2 * np.linalg.norm(weights(honest))
    unbounded = attacked(scaled(factor), FedExP())
    assert np.linalg.norm(weights(unbounded) - weights(honest)) > 5 * distance
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["clipped"] >= 1
        assert metrics["longest_norm"] > 2 * metrics["median_norm"]


def test_the_share_of_a_client_that_reports_a_billion_examples_is_bounded() -> None:
    def start(bound: float | None) -> NDArray[Any]:
        change = with_metric("num-examples", 10**9)
        return weights(attacked(change, FedAvg(bound=bound, weighting="num-examples")))

    def alone(position: int) -> NDArray[Any]:
        nodes = [{"partition-id": position}]
        strategy = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        return weights(strategy.start(FakeGrid(plain_app(), nodes), first_model(), ROUNDS))

    assert np.linalg.norm(start(None) - alone(BAD)) < 1e-6
    assert np.linalg.norm(start(2.0) - alone(BAD)) > 0.3


@pytest.mark.parametrize("value", [100.0, -1e6])
def test_buffers_of_one_client_move_the_mean_by_the_bound_at_most(value: float) -> None:
    change = with_array("bn.running_mean", np.full(1, value, np.float32))
    bounded, free = (
        ndarrays(attacked(change, FedExP(bound=bound)).arrays)["bn.running_mean"].item()
        for bound in (2.0, None)
    )
    assert abs(free) > 10
    assert abs(bounded) < 10


def variance_app() -> ClientApp:
    """An app whose models have a variance; that of the hostile client is negative."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        w = message.content.array_records["arrays"]["w"].numpy()
        variance = np.full(1, -1000.0 if client == BAD else 1.0, np.float32)
        arrays = {"w": Array(w + np.float32(client)), "bn.running_var": Array(variance)}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def test_negative_variances_are_refused_and_their_node_named(lines: list[str]) -> None:
    grid = FakeGrid(variance_app(), 3)
    model = ArrayRecord(
        {"w": Array(np.zeros(DIM, np.float32)), "bn.running_var": Array(np.ones(1, np.float32))}
    )
    result = FedExP(fraction_evaluate=0.0).start(grid, model, 2)
    assert [row["dropped"] for row in result.train_metrics_clientapp.values()] == [1, 1]
    node = f"node {grid.nodes[BAD].node_id} "
    assert any(node in line and "'bn.running_var' has negative" in line for line in lines)


def with_control(factor: float) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        extras = content.array_records[EXTRAS]
        for name in list(extras):
            extras[name] = Array(extras[name].numpy() * factor)

    return change


def test_a_control_variate_times_a_thousand_does_not_end_scaffold() -> None:
    task = least_squares(clients=NODES)
    ends = {}
    for bound in (None, 2.0):
        fault = only(replies(with_control(1e3)), rounds=[2])
        grid = FakeGrid(simulated_app(task), NODES, faults={BAD: fault})
        strategy = Scaffold(bound=bound, fraction_evaluate=0.0, weighting="uniform")
        strategy.start(grid, initial_arrays(task), 3)
        assert strategy.run is not None
        ends[bound] = torch.linalg.vector_norm(strategy.run.state.broadcast["control"]).item()
    assert ends[None] > 20 * ends[2.0]


def test_bound_and_max_norm_need_norms_or_bits() -> None:
    with pytest.raises(UsageError, match="max_norm needs updates that the server can see"):
        FedExP(max_norm=2.0, secure=SecureAggregation(clip=1.0))
    with pytest.raises(UsageError, match="leave bound out"):
        FedExP(bound=2.0, privacy=LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0))
    assert FedExP(bound=3.0).settings.algorithm.bound == 3.0


def huge_share(content: RecordDict) -> None:
    content.array_records["arrays"]["bn.running_mean"] = Array(np.full(1, 1e9, np.float32))
    content.metric_records["metrics"]["num-examples"] = 1e30


def test_a_weight_times_a_buffer_that_overflows_is_refused(lines: list[str]) -> None:
    result = attacked(huge_share, FedExP(weighting="num-examples"))
    assert [row["dropped"] for row in result.train_metrics_clientapp.values()] == [1] * ROUNDS
    assert any("times the norm of its buffers is too large" in line for line in lines)


def scaled_by_weight(content: RecordDict) -> None:
    content.array_records["arrays"]["w"] = Array(np.full(DIM, 9e8, np.float32))
    content.metric_records["metrics"]["num-examples"] = 1e20


@pytest.mark.parametrize("least", [2, NODES])
def test_the_node_of_an_undone_step_is_left_out_whatever_the_cohort_needs(
    least: int, lines: list[str]
) -> None:
    strategy = FedAvg(lr=10.0, weighting="num-examples", min_train_nodes=least)
    result = attacked(scaled_by_weight, strategy)
    clients = [row["clients"] for row in result.train_metrics_clientapp.values()]
    assert clients == [0, NODES - 1, 0, NODES - 1]
    node = FakeGrid(plain_app(), NODES).nodes[BAD].node_id
    undone = [line for line in lines if "is undone" in line]
    assert len(undone) == 2
    assert all("update sums" in line and "100%" in line for line in undone)
    assert node > 0


def test_weight_and_length_together_count_no_more_than_a_long_update() -> None:
    """Nine alike clients; the tenth reverses its update a thousandfold, and claims a billion."""

    def change(content: RecordDict) -> None:
        scaled(-1e3)(content)
        with_metric("num-examples", 10**9)(content)

    faults = {BAD: replies(change)}
    for make in (FedAvg, FedExP):
        for bound in (2.0, 3.0, 5.0):
            strategy = make(bound=bound, weighting="num-examples", fraction_evaluate=0.0)
            result = strategy.start(FakeGrid(plain_app(), 10, faults=faults), first_model(), 10)
            assert np.linalg.norm(weights(result)) < 10


def test_a_diverged_model_is_undone_to_the_last_one_that_was_evaluated(lines: list[str]) -> None:
    models: dict[int, Any] = {}

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        models[round] = ndarrays(arrays)["w"]
        return MetricRecord({"loss": float("inf") if abs(models[round]).max() > 1e3 else 1.0})

    grid = FakeGrid(plain_app(), NODES, faults={BAD: only(replies(scaled(1e8)), rounds=[3])})
    FedAvg(evaluate_every=2).start(grid, first_model(), 8, evaluate_fn=evaluate)
    assert abs(models[4]).max() > 1e3
    assert abs(models[6]).max() < 10
    named = [line for line in lines if "is undone" in line]
    assert len(named) == 1
    assert f"node {grid.nodes[BAD].node_id}," in named[0]


def test_a_buffer_beyond_half_precision_is_undone(lines: list[str]) -> None:
    model = ArrayRecord(
        {
            "w": Array(np.zeros(DIM, np.float16)),
            "bn.running_mean": Array(np.zeros(1, np.float16)),
            "bn.num_batches_tracked": Array(np.array(0)),
        }
    )
    change = replies(with_array("bn.running_mean", np.full(1, 1e8)))
    grid = FakeGrid(plain_app(), NODES, faults={BAD: only(change, rounds=[1])})
    strategy = FedAvg(fraction_evaluate=0.0, weighting="uniform")
    result = strategy.start(grid, model, 3)
    assert [row["clients"] for row in result.train_metrics_clientapp.values()] == [0, 5, 6]
    assert np.isfinite(ndarrays(result.arrays)["bn.running_mean"]).all()
    assert any("share of the buffers sums" in line for line in lines)
