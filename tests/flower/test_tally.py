"""What clients tell, averaged as it comes."""

from __future__ import annotations

import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedexp.flower.metrics import WeightedMetrics


def test_it_is_flowers_mean_without_the_list() -> None:
    told = [
        {"num-examples": 3, "loss": 0.5, "per-class": [1.0, 2.0]},
        {"num-examples": 5, "loss": 0.25, "per-class": [3.0, 4.0]},
    ]
    tally = WeightedMetrics("num-examples")
    for each in told:
        tally.add(each)
    flowers = aggregate_metricrecords(
        [RecordDict({"metrics": MetricRecord(dict(each))}) for each in told],  # type: ignore[arg-type]
        "num-examples",
    )
    assert tally.means() == {name: pytest.approx(value) for name, value in flowers.items()}


def test_a_metric_that_some_tell_is_the_mean_of_those() -> None:
    tally = WeightedMetrics("n")
    tally.add({"n": 1, "loss": 1.0})
    tally.add({"n": 1, "accuracy": 0.5})
    assert tally.means() == {"loss": 1.0, "accuracy": 0.5}


def test_lists_of_another_length_are_left_out() -> None:
    tally = WeightedMetrics("n")
    tally.add({"n": 1, "scores": [1.0, 2.0]})
    tally.add({"n": 1, "scores": [1.0]})
    tally.add({"n": 1, "scores": 3.0})
    assert tally.means() == {"scores": [1.0, 2.0]}


def test_nothing_told_is_nothing() -> None:
    assert WeightedMetrics("n").means() == {}
