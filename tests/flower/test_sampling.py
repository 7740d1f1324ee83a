"""Who takes part: the simulator's cohorts, whatever ids the nodes have, and what they are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

import fedexp as fx
from fedexp.engine.plan import sample_cohort
from fedexp.flower import FedAvg, FedProx, Scaffold, identify, initial_arrays, planned
from fedexp.flower.nodes import Absences, Census, Shares, evaluation_cohort
from tests.flower.fake_grid import FakeGrid, healthy, only, raises, silent
from tests.flower.plain_app import first_model, plain_app
from tests.helpers.problems import least_squares

CLIENTS, COHORT, ROUNDS = 8, 3, 4
OPTIONS: dict[str, Any] = {"fraction_train": COHORT / CLIENTS, "fraction_evaluate": 0.0, "seed": 4}


def named_app() -> ClientApp:
    app = plain_app()
    identify(app)
    return app


def cohorts(grid: FakeGrid) -> list[list[int]]:
    trained = [position for kind, position in grid.sent if kind == "train"]
    return [sorted(trained[at : at + COHORT]) for at in range(0, len(trained), COHORT)]


@pytest.mark.parametrize("seed", [0, 1])
def test_cohorts_are_the_simulators_whatever_ids_the_nodes_have(seed: int) -> None:
    grid = FakeGrid(named_app(), CLIENTS, seed=seed)
    FedAvg(**OPTIONS, identify=True).start(grid, first_model(), ROUNDS)
    assert cohorts(grid) == [
        sample_cohort(4, round, CLIENTS, COHORT).tolist() for round in range(1, ROUNDS + 1)
    ]
    assert grid.sent.count(("query.fedexp", 0)) == 1  # each is asked once


def test_nodes_that_tell_nothing_are_in_the_order_of_their_ids() -> None:
    grid = FakeGrid(plain_app(), CLIENTS)
    FedAvg(**OPTIONS).start(grid, first_model(), 1)
    by_id = sorted(range(CLIENTS), key=lambda k: grid.nodes[k].node_id)
    assert cohorts(grid) == [sorted(by_id[k] for k in sample_cohort(4, 1, CLIENTS, COHORT))]


def test_nobody_is_asked_where_all_take_part() -> None:
    grid = FakeGrid(named_app(), 3)
    FedAvg(fraction_evaluate=0.0).start(grid, first_model(), 2)
    assert {kind for kind, _ in grid.sent} == {"train"}


def test_a_node_that_does_not_answer_the_question_stays_nameless() -> None:
    grid = FakeGrid(named_app(), 3, faults={1: only(silent, kind="query.fedexp"), 2: raises})
    census, ids = Census(), [node.node_id for node in grid.nodes]
    census.ask(grid, ids, timeout=0.1)
    assert [census.client(node) for node in ids] == ["0", None, None]
    assert census.ordered(ids) == [ids[0], *sorted(ids[1:])]


def test_two_nodes_that_claim_the_same_partition_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(named_app(), [{"partition-id": k} for k in (0, 1, 1)])
    census, ids = Census(), [node.node_id for node in grid.nodes]
    with caplog.at_level(logging.WARNING, "flwr"):
        census.ask(grid, [ids[0], ids[1]], timeout=1)
        assert not caplog.records
        census.ask(grid, ids, timeout=1)
        census.ask(grid, ids, timeout=1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "all say that they are client 1; give each node a partition-id" in line
    assert str(ids[1]) in line
    assert str(ids[2]) in line


def test_a_node_that_was_slow_to_answer_is_asked_once_more() -> None:
    grid = FakeGrid(named_app(), 3, faults={0: silent, 1: silent, 2: raises})
    census, ids = Census(), [node.node_id for node in grid.nodes]
    census.ask(grid, ids, timeout=0.1)
    grid.nodes[0].fault = healthy
    census.ask(grid, ids, timeout=0.1)
    census.ask(grid, ids, timeout=0.1)
    assert [census.client(node) for node in ids] == ["0", None, None]
    assert [grid.sent.count(("query.fedexp", k)) for k in range(3)] == [2, 2, 1]


def test_a_node_that_restarts_is_not_one_client_more() -> None:
    """Flower lists the dead node for a minute; SCAFFOLD's mean over clients must not count it."""
    task = least_squares(clients=3)
    app = ClientApp()
    app.train()(planned(task))
    identify(app)
    grid = FakeGrid(app, [{"partition-id": k} for k in (0, 1, 2, 1)])
    grid.nodes[3].online = False

    def restart(round: int, arrays: ArrayRecord) -> None:
        grid.nodes[3].online = round >= 1

    strategy = Scaffold(fraction_evaluate=0.0)
    result = strategy.start(grid, initial_arrays(task), 2, evaluate_fn=restart)
    assert ("train", 3) in grid.sent
    assert [result.train_metrics_clientapp[round]["nodes"] for round in (1, 2)] == [3, 3]


@pytest.mark.parametrize(
    ("fraction", "least", "available", "nodes", "cohort", "needed"),
    [(0.5, 2, 2, 10, 5, 5), (0.1, 2, 2, 10, 2, 2), (1.0, 2, 4, 3, 3, 4), (0.1, 3, 2, 2, 3, 3)],
)
def test_cohorts_have_fedavgs_sizes(
    fraction: float, least: int, available: int, nodes: int, cohort: int, needed: int
) -> None:
    shares = Shares(fraction, least, available)
    assert shares.cohort(nodes) == cohort
    assert shares.needed(nodes) == needed


def test_evaluation_draws_apart_and_never_more_than_there_are() -> None:
    assert evaluation_cohort(0, 1, [5, 6, 7], 10) == [5, 6, 7]
    drawn = [tuple(evaluation_cohort(0, round, list(range(9)), 3)) for round in range(20)]
    assert len(set(drawn)) > 10
    assert drawn == [tuple(evaluation_cohort(0, round, list(range(9)), 3)) for round in range(20)]


def test_absences_grow_and_an_answer_clears_them() -> None:
    away = Absences()
    away.note(1, [1, 2], [3])
    assert away.present(2, [1, 2, 3], 2) == [1, 2]
    assert away.present(2, [1, 3], 2) == [1, 3]  # too few would remain
    away.note(3, [1, 2], [3])
    assert [away.present(round, [1, 3], 1) for round in (4, 5, 6)] == [[1], [1], [1, 3]]
    away.note(6, [3], [])
    away.note(7, [], [3])
    assert away.present(9, [1, 3], 1) == [1, 3]


def config_of(grid: FakeGrid, position: int) -> list[Any]:
    """The configs that a node will be sent."""
    heard: list[Any] = []

    def tap(message: Message) -> None:
        is_train = message.metadata.message_type == "train"
        if is_train and message.metadata.dst_node_id == grid.nodes[position].node_id:
            heard.append(dict(message.content.config_records["config"]))

    grid.taps.append(tap)
    return heard


def test_clients_are_told_their_rule_and_the_study() -> None:
    grid = FakeGrid(plain_app(), 2)
    heard = config_of(grid, 0)
    FedProx(mu=0.25, buffers=["bn.running_mean"]).start(grid, first_model(), 2)
    assert heard[0]["fedexp.client"] == "prox"
    assert heard[0]["fedexp.mu"] == 0.25
    assert heard[0]["fedexp.buffers"] == ["bn.running_mean"]
    assert [told["server-round"] for told in heard] == [1, 2]
    assert heard[0]["fedexp.study"] == heard[1]["fedexp.study"]
    again = config_of(grid, 0)
    FedProx().start(grid, first_model(), 1)
    assert again[-1]["fedexp.study"] != heard[0]["fedexp.study"]  # another run
    assert "fedexp.accepted" not in heard[0]


def test_scaffolds_clients_are_told_which_of_their_rounds_counted() -> None:
    task = least_squares(clients=3)
    app = ClientApp()
    app.train()(planned(task))
    identify(app)
    grid = FakeGrid(app, 3, faults={1: only(raises, rounds=[2])})
    heard, spoilt = config_of(grid, 0), config_of(grid, 1)
    strategy = Scaffold(fraction_evaluate=0.0)
    strategy.start(grid, initial_arrays(task), 4)
    assert [told["fedexp.accepted"] for told in heard] == [0, 1, 2, 3]
    assert [told["fedexp.accepted"] for told in spoilt] == [0, 1, 1, 3]


@pytest.mark.parametrize(("total", "expected"), [(None, 4), (8, 8)])
def test_scaffolds_control_is_over_all_clients_there_are(total: int | None, expected: int) -> None:
    """Two of four take part, so c moves by 2/4 of their mean; by 2/8 where there are eight."""
    task = least_squares(clients=4)
    app = ClientApp()
    app.train()(planned(task))
    identify(app)
    strategy = Scaffold(0.5, 0.0, min_available_nodes=4, total_clients=total)
    strategy.start(FakeGrid(app, 4), initial_arrays(task), 1)
    (record,) = fx.simulate(task, fx.scaffold(), 1, 2, engine="loop")
    assert strategy.training is not None
    found = strategy.training.server.state.broadcast["control"]
    wanted = record.state.broadcast["control"] * 4 / expected
    assert found.numpy() == pytest.approx(wanted.numpy(), rel=1e-5)
