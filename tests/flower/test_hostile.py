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
from fedexp.privacy import CentralPrivacy
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


def test_bound_needs_updates_that_the_server_can_see() -> None:
    with pytest.raises(UsageError, match="bound needs updates that the server can see"):
        FedExP(bound=2.0, secure=SecureAggregation(clip=1.0))
    with pytest.raises(UsageError, match="leave bound out"):
        FedExP(bound=2.0, privacy=CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0))
    assert FedExP(bound=3.0).settings.algorithm.bound == 3.0
