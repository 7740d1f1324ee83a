"""The chaos tool: its own computation of a round, what it refuses, and what it reads in the log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from tools import chaos

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.clipping import clipped_sums, next_medians, split_medians
from fedexp.flower.layout import Layout
from fedexp.flower.server import Server

START = {
    "0.weight": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
    "1.running_mean": np.zeros(2, np.float32),
    "1.running_var": np.ones(2, np.float32),
    "1.num_batches_tracked": np.array(0),
}


def replies_to(start: chaos.Arrays, seed: int, attacks: int = 0) -> list[dict[str, Any]]:
    """Return four replies, of which the last ones have an update times 1e4."""
    rng, replies = np.random.default_rng(seed), []
    for k in range(4):
        scale = 1e4 if k >= 4 - attacks else 0.1
        reply = {n: value + rng.normal(0, 0.1, value.shape) for n, value in start.items()}
        reply["0.weight"] = start["0.weight"] + scale * rng.normal(0, 1, (2, 2))
        reply["1.running_var"] = np.abs(reply["1.running_var"])
        replies.append({n: reply[n].astype(value.dtype) for n, value in start.items()})
    return replies


def stored_round(**changes: Any) -> dict[str, Any]:
    """Return a round as the app stores it: the reply of the second of three nodes has NaN, and the
    third did not answer."""
    good, bad, *_ = replies_to(START, 0)
    bad["0.weight"] = np.full((2, 2), np.nan, np.float32)
    model, _, _ = chaos.expected_model(START, [good], [20.0], {})
    named = {"start": START, "model": model, "0": good, "1": bad}
    arrays = {f"{first}/{n}": value for first, x in named.items() for n, value in x.items()}
    nodes = np.array([11, 12, 13], np.uint64)
    arrays |= {"nodes": nodes, "accepted": np.array([True, False, False])}
    return {**arrays, "weights": np.array([20.0, 30.0, 0.0]), **changes}


def test_three_rounds_computed_in_numpy_are_those_of_the_package() -> None:
    weights = [20.0, 30.0, 40.0, 5000.0]
    server = Server(
        fx.fedexp(bound=chaos.BOUND), ArrayRecord({n: Array(value) for n, value in START.items()})
    )
    model: chaos.Arrays = START
    medians: dict[str, float] = {}
    for round in range(3):
        replies = replies_to(model, round, attacks=round % 2)
        wanted, medians, clipped = chaos.expected_model(model, replies, weights, medians)
        layout: Layout = server.layout
        pairs = [server.contribution(reply, server.start_point()) for reply in replies]
        deltas = torch.stack([delta for delta, _ in pairs])
        extras = {"buffers": torch.stack([extra["buffers"] for _, extra in pairs])}

        def sums(limits: Any, deltas: Any = deltas, extras: Any = extras) -> Aggregate:
            return clipped_sums(deltas, weights, extras, limits)

        aggregate = sums(server.algorithm.limits(server.state.server))
        if round == 0:
            _, none = split_medians(server.state.server)
            aggregate = sums(server.algorithm.limits(next_medians(none, aggregate)))
        assert server.step(aggregate, 4.0)["clipped"] == clipped >= 1
        model = {name: array.numpy() for name, array in server.model().items()}
        assert layout.misfit(model) is None
        for name, value in wanted.items():
            np.testing.assert_allclose(model[name], value, rtol=0, atol=1e-6 * np.abs(value).max())


def test_a_round_that_is_right_has_no_failure_and_is_counted() -> None:
    check = chaos.Check()
    check.add(stored_round())
    assert check.failures == []
    assert check.rounds == 1
    assert check.counts == {"refused": 1, "unanswered": 1, "clipped": 0}
    assert check.left_out == {12: 1, 13: 1}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"model/0.weight": START["0.weight"] + 1e-4}, "the model is off by"),
        ({"accepted": np.array([False, False, False])}, "reply of node 11 is accepted: False"),
        ({"1/0.weight": START["0.weight"]}, "reply of node 12 is accepted: False"),
        ({"0/1.running_var": -START["1.running_var"]}, "reply of node 11 is accepted: True"),
    ],
)
def test_a_round_that_is_wrong_is_a_failure(changes: dict[str, Any], failure: str) -> None:
    check = chaos.Check()
    check.add(stored_round(**changes))
    assert failure in check.failures[0]


def test_a_round_must_start_from_the_model_of_the_round_before() -> None:
    check = chaos.Check()
    check.add(stored_round())
    check.add(stored_round())
    assert any("does not start from" in failure for failure in check.failures)


def test_nodes_that_are_left_out_are_read_from_the_log() -> None:
    log = """\x1b[93mWARNING \x1b[0m: node 12 is left out of this round: 'x' has negative variances
    INFO: node 13 is fine
    WARNING: node 12 is left out of this round: node 14 is left out of this round"""
    assert chaos.named_in_log(log) == {12: 2, 14: 1}


def test_a_plan_is_that_of_its_seed_and_at_most_two_nodes_are_down() -> None:
    events = chaos.plan(1, 3600.0)
    assert events == chaos.plan(1, 3600.0) != chaos.plan(2, 3600.0)
    assert {event.action for event in events} == {"kill", "stop", "restart", "start", "continue"}
    down: dict[int, str] = {}
    for event in events:
        if event.action in ("start", "continue"):
            assert chaos.EVENTS[down.pop(event.node)] == event.action
            continue
        assert event.node not in down
        if event.action != "restart":
            down[event.node] = event.action
        assert len(down) <= chaos.MOST_DOWN
    assert not down
