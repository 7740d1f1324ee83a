"""Rounds without enough replies, what clients are sent, and warnings about their training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

import fedexp as fx
from fedexp.flower import (
    FedAvg,
    FedExP,
    FedProx,
    Scaffold,
    initial_arrays,
    simulated_train,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.server import NoRepliesError
from tests.flower.helpers.fake_grid import (
    Answer,
    FakeGrid,
    only,
    raises,
    replies,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app
from tests.flower.helpers.rounds import Rounds
from tests.flower.helpers.user_app import (
    control,
    simulated_app,
    uniform_strategy,
)
from tests.helpers.problems import least_squares

TASK = least_squares(clients=4, dim=8)
CLOSE = 1e-10


def test_a_round_without_replies_leaves_the_model_and_the_run_continues() -> None:
    faults = {k: only(raises, rounds=[2]) for k in range(3)}
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 3)
    expected = FedAvg().start(FakeGrid(plain_app(), 3), first_model(), 2)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    assert result.train_metrics_clientapp[2]["clients"] == 0
    assert "server_lr" not in result.train_metrics_clientapp[2]


def test_empty_rounds_in_a_row_end_the_run() -> None:
    faults = {k: only(raises, rounds=range(2, 9)) for k in range(3)}
    grid = FakeGrid(plain_app(), 3, faults=faults)
    with pytest.raises(NoRepliesError, match="2 rounds in a row"):
        FedAvg(max_empty_rounds=2).start(grid, first_model(), 9)
    assert grid.sent.count(("train", 0)) == 3


def test_a_round_with_too_few_replies_leaves_the_model(lines: list[str]) -> None:
    faults = {k: only(raises, rounds=[2]) for k in (0, 1)}
    grid = FakeGrid(plain_app(), 3, faults=faults)
    result = FedAvg(min_replies=2).start(grid, first_model(), 3)
    expected = FedAvg().start(FakeGrid(plain_app(), 3), first_model(), 2)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"]) == (0, 3)
    assert any("1 usable replies of 2 needed" in line for line in lines)
    with pytest.raises(NoRepliesError, match="3 rounds in a row"):
        FedAvg(min_replies=4).start(FakeGrid(plain_app(), 3), first_model(), 4)


def test_scaffold_discards_client_states_where_too_few_replied() -> None:
    task = least_squares(clients=3)
    app = simulated_app(task)
    grid = FakeGrid(app, 3, faults={1: only(raises, rounds=[2])})
    sent: list[Any] = []

    def tap(message: Message) -> None:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if (kind, node) == ("train", grid.nodes[0].node_id):
            sent.append(message.content.config_records["config"]["fedexp.accepted"])

    grid.taps.append(tap)
    Scaffold(fraction_evaluate=0.0, min_replies=3).start(grid, initial_arrays(task), 3)
    assert sent == [0, 1, 1]


def test_plain_clients_are_not_queried() -> None:
    grid = FakeGrid(plain_app(), 4)
    FedExP(fraction_train=0.5, min_available_nodes=4).start(grid, first_model(), 2)
    assert {kind for kind, _ in grid.sent} == {"train", "evaluate"}


def test_fedprox_with_a_plain_client_is_not_taken_for_fedprox(lines: list[str]) -> None:
    grid, sent = FakeGrid(plain_app(), 3), list[Any]()
    grid.taps.append(lambda m: sent.append(m.content.config_records.get("config", {})))
    FedProx(proximal_mu=0.25, fraction_evaluate=0.0).start(grid, first_model(), 2)
    assert {config["proximal-mu"] for config in sent if config} == {0.25}
    warned = [
        line for line in lines if "3 of 3 replies do not confirm the client rule 'prox'" in line
    ]
    assert len(warned) == 1


@pytest.mark.parametrize("mu", [0.25, 0.0])
def test_fedprox_with_a_client_that_confirms_it_logs_nothing(mu: float, lines: list[str]) -> None:
    task = least_squares(clients=3)
    app = ClientApp()
    app.train()(simulated_train(task))
    FedProx(mu=mu, fraction_evaluate=0.0).start(FakeGrid(app, 3), initial_arrays(task), 1)
    FedProx(mu=0.0, fraction_evaluate=0.0).start(FakeGrid(plain_app(), 3), first_model(), 1)
    assert not [line for line in lines if "confirm" in line]


def overshoots(message: Message, answer: Answer) -> Message | None:
    """Clients that disagree in the first round and agree in the second."""
    reply = answer()
    config: Any = message.content.config_records["config"]
    sent = message.content.array_records["arrays"]["w"].numpy()
    client = int(reply.content.metric_records["metrics"]["train_loss"])  # type: ignore[arg-type]
    own = np.eye(DIM)[client] - 0.1 if config["server-round"] == 1 else 1.0
    reply.content.array_records["arrays"]["w"] = Array((sent + own).astype(np.float32))
    return reply


@pytest.mark.parametrize(("max_step", "expected"), [(float("inf"), 1), (2.0, 0)])
def test_a_step_that_went_too_far_is_logged_with_what_to_retune(
    max_step: float, expected: int, lines: list[str]
) -> None:
    grid = FakeGrid(plain_app(), 5, faults=dict.fromkeys(range(5), only(overshoots)))
    strategy = FedExP(eps=0.0, max_step=max_step, weighting="uniform", fraction_evaluate=0.0)
    strategy.start(grid, first_model(), 3)
    warned = [line for line in lines if "set max_step=2 or raise eps" in line]
    assert len(warned) == expected


@pytest.mark.parametrize(
    ("nodes", "options", "step"),
    [
        (2, {}, "2 clients per round the step exceeds 1 only"),
        (3, {}, "3 clients per round the step exceeds 1.5 only"),
        (2, {"factor": 1.0}, ""),
        (4, {}, ""),
    ],
)
def test_cohorts_that_are_too_small_for_longer_steps_are_logged_once(
    nodes: int, options: Any, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "flwr"):
        FedExP(fraction_evaluate=0.0, **options).start(FakeGrid(plain_app(), nodes), first_model())
        FedAvg(fraction_evaluate=0.0).start(FakeGrid(plain_app(), 2), first_model())
    hints = [message for message in caplog.messages if "let more clients take part" in message]
    assert [step in hint for hint in hints] == [True] * bool(step)


def spoil(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord({"params": Array(np.full(8, np.nan))})


def test_client_state_of_a_dropped_reply_is_discarded() -> None:
    made, arrays = uniform_strategy(fx.scaffold()), initial_arrays(TASK)
    faulty = {1: only(replies(spoil), rounds=[2])}
    made.start(FakeGrid(simulated_app(TASK), 4, faults=faulty), arrays, num_rounds=4)
    reference = Rounds(FakeGrid(simulated_app(TASK), 4), fx.scaffold(), arrays)
    for cohort in ([0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]):
        reference.run(cohort)
    expected = reference.server.state.broadcast["control"]
    torch.testing.assert_close(control(made), expected, rtol=CLOSE, atol=CLOSE)


def config_of(grid: FakeGrid, position: int) -> list[Any]:
    """The configs that a node will be sent."""
    sent: list[Any] = []

    def tap(message: Message) -> None:
        is_train = message.metadata.message_type == "train"
        if is_train and message.metadata.dst_node_id == grid.nodes[position].node_id:
            sent.append(dict(message.content.config_records["config"]))

    grid.taps.append(tap)
    return sent


def test_messages_carry_the_rule_and_the_study() -> None:
    grid = FakeGrid(plain_app(), 2)
    sent = config_of(grid, 0)
    FedProx(mu=0.25, buffers=["bn.running_mean"]).start(grid, first_model(), 2)
    assert sent[0]["fedexp.client"] == "prox"
    assert sent[0]["fedexp.mu"] == 0.25
    assert sent[0]["fedexp.buffers"] == ["bn.running_mean"]
    assert [config["server-round"] for config in sent] == [1, 2]
    assert sent[0]["fedexp.api"] == sent[1]["fedexp.api"]
    again = config_of(grid, 0)
    FedProx().start(grid, first_model(), 1)
    assert again[-1]["fedexp.api"] != sent[0]["fedexp.api"]  # another run
    assert "fedexp.accepted" not in sent[0]


def test_messages_carry_the_last_accepted_round_for_scaffold() -> None:
    task = least_squares(clients=3)
    app = simulated_app(task)
    grid = FakeGrid(app, 3, faults={1: only(raises, rounds=[2])})
    sent, spoilt = config_of(grid, 0), config_of(grid, 1)
    strategy = Scaffold(fraction_evaluate=0.0)
    strategy.start(grid, initial_arrays(task), 4)
    assert [config["fedexp.accepted"] for config in sent] == [0, 1, 2, 3]
    assert [config["fedexp.accepted"] for config in spoilt] == [0, 1, 1, 3]


def test_scaffold_with_clients_that_report_no_id_warns_of_it(lines: list[str]) -> None:
    """Where a reply of theirs is lost, the server's control is no longer the mean of theirs."""
    anonymous = ClientApp()
    anonymous.train()(simulated_train(TASK))
    for app, expected in ((anonymous, 1), (simulated_app(TASK), 0)):
        lines.clear()
        Scaffold(fraction_evaluate=0.0).start(FakeGrid(app, 4), initial_arrays(TASK), 2)
        assert sum("add report_client_id(app)" in line for line in lines) == expected


@pytest.mark.parametrize(("total", "expected"), [(None, 4), (8, 8), (1, 4)])
def test_scaffolds_control_is_over_all_clients(
    total: int | None, expected: int, lines: list[str]
) -> None:
    """Two of four take part, so c changes by 2/4 of their mean; by 2/8 with eight clients."""
    task = least_squares(clients=4)
    app = simulated_app(task)
    strategy = Scaffold(0.5, 0.0, min_available_nodes=4, total_clients=total)
    strategy.start(FakeGrid(app, 4), initial_arrays(task), 1)
    (record,) = fx.simulate(task, fx.scaffold(), 1, 2, engine="loop")
    assert strategy.run is not None
    found = strategy.run.state.broadcast["control"]
    wanted = record.state.broadcast["control"] * 4 / expected
    assert found.numpy() == pytest.approx(wanted.numpy(), rel=1e-5)
    assert sum("total_clients=1, but there are 4" in line for line in lines) == (total == 1)
