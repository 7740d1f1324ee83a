"""Nodes: their identities, the simulator's cohorts whatever ids they have, and backoff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fedexp.engine.plan import sample_cohort
from fedexp.flower import (
    FedAvg,
    Scaffold,
    initial_arrays,
    report_client_id,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.nodes import (
    CohortSize,
    NodeBackoff,
    NodeRegistry,
    TooFewNodesError,
    evaluation_cohort,
)
from fedexp.privacy import CentralPrivacy
from tests.flower.helpers import private
from tests.flower.helpers.fake_grid import FakeGrid, healthy, only, raises, silent
from tests.flower.helpers.plain_app import first_model, plain_app
from tests.flower.helpers.user_app import simulated_app
from tests.helpers.problems import least_squares

CLIENTS, COHORT, ROUNDS = 8, 3, 4


OPTIONS: dict[str, Any] = {"fraction_train": COHORT / CLIENTS, "fraction_evaluate": 0.0, "seed": 4}


def named_app() -> ClientApp:
    app = plain_app()
    report_client_id(app)
    return app


def cohorts(grid: FakeGrid) -> list[list[int]]:
    trained = [position for kind, position in grid.sent if kind == "train"]
    return [sorted(trained[at : at + COHORT]) for at in range(0, len(trained), COHORT)]


@pytest.mark.parametrize("seed", [0, 1])
def test_cohorts_are_the_simulators_whatever_ids_the_nodes_have(seed: int) -> None:
    grid = FakeGrid(named_app(), CLIENTS, seed=seed)
    FedAvg(**OPTIONS, query_client_ids=True).start(grid, first_model(), ROUNDS)
    assert cohorts(grid) == [
        sample_cohort(4, round, CLIENTS, COHORT).tolist() for round in range(1, ROUNDS + 1)
    ]
    assert grid.sent.count(("query.fedexp", 0)) == 1  # each is queried once


def test_anonymous_nodes_are_ordered_by_id() -> None:
    grid = FakeGrid(plain_app(), CLIENTS)
    FedAvg(**OPTIONS).start(grid, first_model(), 1)
    by_id = sorted(range(CLIENTS), key=lambda k: grid.nodes[k].node_id)
    assert cohorts(grid) == [sorted(by_id[k] for k in sample_cohort(4, 1, CLIENTS, COHORT))]


def test_no_node_is_queried_where_all_take_part() -> None:
    grid = FakeGrid(named_app(), 3)
    FedAvg(fraction_evaluate=0.0).start(grid, first_model(), 2)
    assert {kind for kind, _ in grid.sent} == {"train"}


def test_a_node_that_does_not_answer_the_query_stays_anonymous() -> None:
    grid = FakeGrid(named_app(), 3, faults={1: only(silent, kind="query.fedexp"), 2: raises})
    registry, ids = NodeRegistry(), [node.node_id for node in grid.nodes]
    registry.query(grid, ids, timeout=0.1)
    assert [registry.client(node) for node in ids] == ["0", None, None]
    assert registry.sort(ids) == [ids[0], *sorted(ids[1:])]


def test_the_first_node_of_a_name_keeps_it_while_it_is_online(lines: list[str]) -> None:
    grid = FakeGrid(named_app(), [{"partition-id": k} for k in (0, 1, 1, 1)])
    registry, ids = NodeRegistry(), [node.node_id for node in grid.nodes]
    assert registry.query(grid, [ids[0], ids[2]], timeout=1) == [ids[0], ids[2]]
    assert not lines
    for _ in range(2):
        assert registry.query(grid, ids, timeout=1) == [ids[0], ids[2]]
        assert [registry.client(node) for node in ids] == ["0", None, "1", None]
    assert len(lines) == 2  # one per node that is refused
    wanted = f"node {ids[1]} is refused: it reports that it is client 1, which node {ids[2]} is"
    assert wanted in lines[0]
    assert "give each node a different partition-id" in lines[0]
    left = [ids[0], ids[1]]  # the first of the name is gone, as a node that was killed
    assert registry.query(grid, left, timeout=1) == left
    assert [registry.client(node) for node in ids] == ["0", "1", None, None]
    assert registry.query(grid, ids, timeout=1) == left
    assert [grid.sent.count(("query.fedexp", k)) for k in range(4)] == [1] * 4


def test_a_second_node_of_a_name_does_not_reset_the_state_of_the_first(
    tmp_path: Path, lines: list[str]
) -> None:
    """Its accepted rounds counted as the honest client's, which had no state of these rounds."""
    task, ends = least_squares(clients=4), []
    for intruder in ([], [{"partition-id": 1, "fedexp-state": str(tmp_path / "intruder")}]):
        nodes: list[Any] = [{"partition-id": k} for k in range(4)]
        grid = FakeGrid(simulated_app(task), nodes + intruder)
        strategy = Scaffold(fraction_train=0.5, min_available_nodes=4, seed=3)
        result = strategy.start(grid, initial_arrays(task), 8)
        assert {kind for kind, position in grid.sent if position == 4} <= {"query.fedexp"}
        assert result.train_metrics_clientapp[8]["nodes"] == 4
        ends.append(ndarrays(result.arrays)["params"])
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not any("starts with a fresh state" in line for line in lines)


def test_a_second_node_of_a_name_does_not_displace_the_first_from_private_cohorts() -> None:
    """The last one of a name was drawn, whichever that was."""
    named = private.app()
    report_client_id(named)
    for seed in range(3):  # of the node ids, by which nodes of a partition are ordered
        grid = FakeGrid(named, [{"partition-id": k} for k in (0, 1, 2, 2)], seed=seed)
        privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
        (row,) = private.metrics_of(private.strategy(privacy=privacy), grid)
        assert [grid.sent.count(("train", k)) for k in range(4)] == [1, 1, 1, 0]
        assert (row["clients"], row["nodes"]) == (3, 3)


def test_a_refused_node_is_not_one_of_the_available_ones() -> None:
    grid = FakeGrid(named_app(), [{"partition-id": k} for k in (0, 1, 1)])
    strategy = FedAvg(min_available_nodes=3, query_client_ids=True, wait_for_nodes=0.1)
    with pytest.raises(TooFewNodesError, match="2 of 3 nodes"):
        strategy.start(grid, first_model(), 1)


def test_each_plain_client_of_a_private_run_has_one_line(lines: list[str]) -> None:
    """The server's log had nothing about the query that fails there."""
    grid = FakeGrid(private.app(), 3)
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    private.metrics_of(private.strategy(privacy=privacy), grid, rounds=2)
    for node in grid.nodes:
        (line,) = [line for line in lines if str(node.node_id) in line]
        assert "reports no client id" in line
        assert "its ClientApp needs report_client_id(app)" in line
        assert "\n" not in line


def test_a_node_that_was_slow_to_answer_is_queried_once_more() -> None:
    grid = FakeGrid(named_app(), 3, faults={0: silent, 1: silent, 2: raises})
    registry, ids = NodeRegistry(), [node.node_id for node in grid.nodes]
    registry.query(grid, ids, timeout=0.1)
    grid.nodes[0].fault = healthy
    registry.query(grid, ids, timeout=0.1)
    registry.query(grid, ids, timeout=0.1)
    assert [registry.client(node) for node in ids] == ["0", None, None]
    assert [grid.sent.count(("query.fedexp", k)) for k in range(3)] == [2, 2, 1]


def test_a_restarted_node_takes_part_once_the_dead_one_is_gone() -> None:
    """Flower lists that for a minute; SCAFFOLD's mean over clients must not count both."""
    task = least_squares(clients=3)
    app = simulated_app(task)
    grid = FakeGrid(app, [{"partition-id": k} for k in (0, 1, 2, 1)])
    grid.nodes[3].online = False

    def restart(round: int, arrays: ArrayRecord) -> None:
        grid.nodes[3].online = round >= 1
        grid.nodes[1].online = round < 2

    strategy = Scaffold(fraction_evaluate=0.0)
    result = strategy.start(grid, initial_arrays(task), 3, evaluate_fn=restart)
    assert [grid.sent.count(("train", k)) for k in range(4)] == [3, 2, 3, 1]
    rows = result.train_metrics_clientapp.values()
    assert [(row["nodes"], row["clients"]) for row in rows] == [(3, 3)] * 3


@pytest.mark.parametrize(
    ("fraction", "least", "available", "nodes", "cohort", "needed"),
    [(0.5, 2, 2, 10, 5, 5), (0.1, 2, 2, 10, 2, 2), (1.0, 2, 4, 3, 3, 4), (0.1, 3, 2, 2, 3, 3)],
)
def test_cohorts_have_fedavgs_sizes(
    fraction: float, least: int, available: int, nodes: int, cohort: int, needed: int
) -> None:
    size = CohortSize(fraction, least, available)
    assert size.of(nodes) == cohort
    assert size.needed(nodes) == needed


def test_evaluation_cohorts_are_independent_and_at_most_all_nodes() -> None:
    assert evaluation_cohort(0, 1, [5, 6, 7], 10) == [5, 6, 7]
    drawn = [tuple(evaluation_cohort(0, round, list(range(9)), 3)) for round in range(20)]
    assert len(set(drawn)) > 10
    assert drawn == [tuple(evaluation_cohort(0, round, list(range(9)), 3)) for round in range(20)]


def test_backoff_doubles_and_an_answer_resets_it() -> None:
    backoff = NodeBackoff()
    backoff.record(1, [1, 2], [3])
    assert backoff.active(2, [1, 2, 3], 2) == [1, 2]
    assert backoff.active(2, [1, 3], 2) == [1, 3]  # too few would remain
    backoff.record(3, [1, 2], [3])
    assert [backoff.active(round, [1, 3], 1) for round in (4, 5, 6)] == [[1], [1], [1, 3]]
    backoff.record(6, [3], [])
    backoff.record(7, [], [3])
    assert backoff.active(9, [1, 3], 1) == [1, 3]


def test_a_node_that_hangs_costs_the_timeout_in_few_rounds() -> None:
    grid = FakeGrid(plain_app(), 4, faults={1: only(silent)})
    result = FedAvg(fraction_evaluate=0.0).start(grid, first_model(), 8, timeout=0.2)
    assert grid.sent.count(("train", 1)) == 3  # rounds 1, 3 and 6
    assert [int(m["unanswered"]) for m in result.train_metrics_clientapp.values()] == [  # type: ignore[arg-type]
        1, 0, 1, 0, 0, 1, 0, 0,
    ]  # fmt: skip


def test_a_node_that_hangs_is_sent_no_evaluation_meanwhile() -> None:
    grid = FakeGrid(plain_app(), 4, faults={1: silent})
    FedAvg().start(grid, first_model(), 3, timeout=0.2)
    assert grid.sent.count(("train", 1)) == 2  # rounds 1 and 3
    assert grid.sent.count(("evaluate", 1)) == 0
    assert grid.sent.count(("evaluate", 2)) == 3


def test_a_node_that_hangs_in_evaluations_still_trains() -> None:
    grid = FakeGrid(plain_app(), 4, faults={1: only(silent, kind="evaluate")})
    result = FedAvg().start(grid, first_model(), 5, timeout=0.2)
    assert grid.sent.count(("evaluate", 1)) == 2  # rounds 1 and 3
    assert [m["clients"] for m in result.train_metrics_clientapp.values()] == [4] * 5


def test_too_few_nodes_end_the_run_in_time_with_their_number() -> None:
    grid = FakeGrid(plain_app(), 2)
    strategy = FedAvg(min_available_nodes=5, wait_for_nodes=0.2)
    with pytest.raises(TooFewNodesError, match=r"2 of 5 nodes after waiting 0\.2 s; start more"):
        strategy.start(grid, first_model(), 2)
    with pytest.raises(TooFewNodesError, match=r"0\.1 s"):
        FedAvg(min_available_nodes=5).start(grid, first_model(), 2, timeout=0.1)
    assert not grid.sent


def test_nodes_that_come_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = FakeGrid(plain_app(), 2)
    looks = iter([[], [grid.nodes[0].node_id]])
    listed = grid.get_node_ids
    monkeypatch.setattr(grid, "get_node_ids", lambda: next(looks, None) or listed())
    monkeypatch.setattr("fedexp.flower.nodes.POLL", 0.01)
    result = FedAvg(fraction_evaluate=0.0).start(grid, first_model(), 1, timeout=60)
    assert result.train_metrics_clientapp[1]["clients"] == 2
