"""Means of clients' metrics: Flower's own, and finite whatever a client reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedexp.flower import (
    FedAvg,
    FedExP,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.metrics import MAX_SIZE, WeightedMetrics
from tests.flower.helpers.fake_grid import (
    FakeGrid,
    only,
    raises,
    replies,
    silent,
    with_metric,
)
from tests.flower.helpers.plain_app import first_model, plain_app, target

BAD = 1  # the position of the node that misbehaves


def test_it_is_flowers_mean_without_the_list() -> None:
    reported = [
        {"num-examples": 3, "loss": 0.5, "per-class": [1.0, 2.0]},
        {"num-examples": 5, "loss": 0.25, "per-class": [3.0, 4.0]},
    ]
    tally = WeightedMetrics("num-examples")
    for node, metrics in enumerate(reported):
        tally.add(node, metrics)
    flowers = aggregate_metricrecords(
        [RecordDict({"metrics": MetricRecord(dict(metrics))}) for metrics in reported],  # type: ignore[arg-type]
        "num-examples",
    )
    assert tally.means() == {name: pytest.approx(value) for name, value in flowers.items()}


def test_a_metric_of_some_clients_is_their_mean() -> None:
    tally = WeightedMetrics("n")
    tally.add(1, {"n": 1, "loss": 1.0})
    tally.add(2, {"n": 1, "accuracy": 0.5})
    assert tally.means() == {"loss": 1.0, "accuracy": 0.5}


def test_the_type_of_a_metric_is_that_of_most_clients(lines: list[str]) -> None:
    """The first reply decided it, so one client left the metrics of all others out."""
    tally = WeightedMetrics("n")
    tally.add(1, {"n": 1e6, "scores": [1.0], "loss": [2.0, 2.0]})
    for node in (2, 3, 4):
        tally.add(node, {"n": 1, "scores": [node, 2.0], "loss": 0.5})
    tally.add(5, {"n": 1, "scores": 3.0, "loss": 0.5})
    assert not lines
    assert tally.means() == {"scores": [3.0, 2.0], "loss": 0.5}
    assert sorted(line[:41] for line in lines) == [
        "node 1: 2 of its metrics are left out of ",
        "node 5: 1 of its metrics are left out of ",
    ]


def test_names_and_lists_of_a_client_are_bounded(lines: list[str]) -> None:
    """100,000 names took 8 s and 10 MB in each round."""
    many = {f"{name:06}": 0.0 for name in range(10_000)}

    def flood(content: RecordDict) -> None:
        long: Any = {"long": [0.0] * (MAX_SIZE + 1), "x" * MAX_SIZE: 1.0}
        content["metrics"] = MetricRecord({"num-examples": 20, "loss": 9.0, **long, **many})

    grid = FakeGrid(plain_app(), 3, faults={BAD: replies(flood)})
    result = FedAvg().start(grid, first_model(), 1)
    for record in (result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]):
        assert len(record) < MAX_SIZE / 7 + 20
        assert not {"long", "x" * MAX_SIZE} & record.keys()
    assert result.train_metrics_clientapp[1]["clients"] == 3
    named = [line for line in lines if str(grid.nodes[BAD].node_id) in line]
    assert len(named) == 2  # the training and the evaluation
    assert all("of its metrics are left out" in line and len(line) < 500 for line in named)


def test_a_client_without_examples_adds_nothing_and_keeps_the_weights() -> None:
    """One such client made all count the same: 0.4 instead of 0.894."""
    tally = WeightedMetrics("n")
    for examples, accuracy in ((1000, 0.9), (0, 0.0), (10, 0.3)):
        tally.add(0, {"n": examples, "accuracy": accuracy})
    assert tally.means() == {"accuracy": pytest.approx((1000 * 0.9 + 10 * 0.3) / 1010)}
    nothing = WeightedMetrics("n")
    for loss in (1.0, 3.0):
        nothing.add(0, {"n": 0, "loss": loss})
    assert nothing.means() == {"loss": 2.0}


def test_an_evaluation_without_a_weight_is_logged_with_what_follows(lines: list[str]) -> None:
    def unweighted(content: RecordDict) -> None:
        del content.metric_records["metrics"]["num-examples"]

    fault = only(replies(unweighted), kind="evaluate")
    grid = FakeGrid(plain_app(), 3, faults={BAD: fault, 2: fault})
    result = FedAvg().start(grid, first_model(), 1)
    (line,) = [line for line in lines if "all clients count the same" in line]
    assert "num-examples" in line
    assert any(str(grid.nodes[k].node_id) in line for k in (BAD, 2))
    w = ndarrays(result.arrays)["w"]
    losses = [np.square(w - target(k)).sum() for k in range(3)]
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_no_metrics_have_no_means() -> None:
    assert WeightedMetrics("n").means() == {}


@pytest.mark.parametrize(("loss", "examples"), [(1e300, 10**10), (1e308, 20), (-1e308, 20)])
def test_a_huge_evaluation_ends_no_run(loss: float, examples: int) -> None:
    def change(content: RecordDict) -> None:
        content.metric_records["metrics"].update({"loss": loss, "num-examples": examples})

    fault = only(replies(change), kind="evaluate")
    grid = FakeGrid(plain_app(), 3, faults={BAD: fault, 2: only(replies(change), kind="evaluate")})
    result = FedExP().start(grid, first_model(), 2)
    measured: Any = result.evaluate_metrics_clientapp[2]["loss"]
    assert np.isfinite(measured)
    assert 0.5 < measured / loss <= 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")]])
def test_an_evaluation_that_is_not_finite_is_left_out_with_a_line(
    value: Any, lines: list[str]
) -> None:
    fault = only(replies(with_metric("loss", value)), kind="evaluate")
    grid = FakeGrid(plain_app(), 3, faults={BAD: fault})
    result = FedAvg().start(grid, first_model(), 1)
    others = FakeGrid(plain_app(), 3, faults={BAD: only(raises, kind="evaluate")})
    expected = FedAvg().start(others, first_model(), 1)
    assert dict(result.evaluate_metrics_clientapp[1]) == dict(
        expected.evaluate_metrics_clientapp[1]
    )
    named = [line for line in lines if str(grid.nodes[BAD].node_id) in line]
    assert len([line for line in named if line.endswith("in all: 'loss'")]) == 1


def test_means_of_the_largest_numbers_are_finite(lines: list[str]) -> None:
    largest, tally = float(np.finfo(np.float64).max), WeightedMetrics("n")
    for weight in (1, 3, 7):
        tally.add(weight, {"n": weight, "loss": largest, "both": [-largest, largest]})
    assert not lines
    tally.add(8, {"n": 1, "loss": float("inf"), "both": [0.0, 1.0]})
    assert [line.endswith("in all: 'loss'") for line in lines] == [True]
    means: Any = tally.means()
    assert means["loss"] == pytest.approx(largest)
    assert np.isfinite(means["both"]).all()


def test_an_own_function_that_returns_nan_ends_no_run() -> None:
    def worst(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"loss": float("nan")})

    strategy = FedAvg(evaluate_metrics_aggr_fn=worst)
    result = strategy.start(FakeGrid(plain_app(), 3), first_model(), 2)
    assert result.evaluate_metrics_clientapp.keys() == {1, 2}


def test_a_broken_evaluation_costs_nothing_but_its_numbers(lines: list[str]) -> None:
    faults = {BAD: only(raises, kind="evaluate"), 0: only(silent, kind="evaluate")}
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 1, timeout=0.3)
    alone = FedAvg(min_train_nodes=1, min_available_nodes=1).start(
        FakeGrid(plain_app(), [{"partition-id": 2}]), first_model(), 1
    )
    assert result.train_metrics_clientapp[1]["clients"] == 3
    assert result.evaluate_metrics_clientapp[1].keys() == alone.evaluate_metrics_clientapp[1].keys()
    assert sum("left out of the evaluation" in line for line in lines) == 2


def test_metrics_of_clients_that_are_named_like_the_servers_are_left_out_with_a_line(
    lines: list[str],
) -> None:
    faults = {k: only(replies(with_metric("seconds", 120.0))) for k in range(3)}
    result = FedExP().start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 2)
    seconds: Any = result.train_metrics_clientapp[2]["seconds"]
    assert seconds < 100.0
    assert "train_loss" in result.train_metrics_clientapp[2]
    assert sum("named seconds" in line and "rename" in line for line in lines) == 1


def test_metrics_that_are_not_finite_do_not_spoil_the_mean() -> None:
    fault = only(replies(with_metric("train_loss", float("nan"))))
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults={2: fault}), first_model(), 1)
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(20 / 30)
