"""Secure rounds give the sums of plain ones, and refuse what would not be secure."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)

from fedexp import fedavg, fedexp, scaffold_exp
from fedexp.errors import UsageError
from fedexp.flower import Server
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.secure_client import SecureMod, secure_mod
from fedexp.flower.secure_payload import PAYLOAD, SecureAggregation, payload_config
from tests.flower.helpers.fake_grid import FakeGrid, healthy, raises
from tests.flower.helpers.secure import (
    app_of,
    at_stage,
    plain_sums,
    positions,
    random_updates,
    secure_round,
    server_of,
)

SECURE = SecureAggregation(clip=2.0)
STAGES = Stage.all()


@pytest.mark.parametrize(
    ("dim", "clients", "clip", "rounds"), [(1_000, 7, 50.0, 4), (1_000_000, 5, 2.0, 2)]
)
def test_the_step_size_and_the_model_are_those_of_plain_sums(
    dim: int, clients: int, clip: float, rounds: int
) -> None:
    update = random_updates(dim)
    grid, secure = FakeGrid(app_of(update), clients), SecureAggregation(clip=clip)
    ours, plain = server_of(dim, fedexp(eps=1e-4)), server_of(dim, fedexp(eps=1e-4))
    for round in range(1, rounds + 1):
        found = ours.step(secure_round(ours, grid, secure, round).aggregate, clients)
        exact = plain.step(plain_sums(update, [*range(clients)], round), clients)
        assert exact["server_lr"] > 1.2
        assert found["server_lr"] == pytest.approx(exact["server_lr"], rel=1e-5)
        assert found["diversity"] == pytest.approx(exact["diversity"], rel=1e-5)
    scale = plain.state.params.abs().max()
    assert torch.allclose(ours.state.params, plain.state.params, rtol=0, atol=1e-5 * float(scale))


def test_a_round_repeats_to_the_last_bit() -> None:
    """Masks and Flower's rounding are random; nothing of them is left."""
    update, server = random_updates(500), server_of(500)
    first, second = (
        secure_round(server, FakeGrid(app_of(update), 5), SECURE).aggregate for _ in range(2)
    )
    assert first == second


def test_updates_beyond_the_clip_are_scaled_down_by_the_clients() -> None:
    update = random_updates(100)  # norms 0.4, 0.5, ... 0.8
    gathered = secure_round(
        server_of(100), FakeGrid(app_of(update), 5), SecureAggregation(clip=0.65)
    )
    clipped = [update(c, 1) * min(1, 0.65 / np.linalg.norm(update(c, 1))) for c in range(5)]
    assert gathered.metrics["clipped"] == 2
    assert gathered.aggregate.sq_norm.item() == pytest.approx(sum(u @ u for u in clipped), rel=1e-5)
    assert gathered.aggregate.update.numpy() == pytest.approx(sum(clipped), abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_never_enters_the_sum(bad: float) -> None:
    sound = random_updates(16)

    def update(client: int, round: int) -> np.ndarray:
        return np.full(16, bad, np.float32) if client == 1 else sound(client, round)

    grid = FakeGrid(app_of(update), 4)
    gathered = secure_round(server_of(16), grid, SECURE)
    assert positions(grid, gathered.accepted) == [0, 2, 3]
    assert torch.allclose(gathered.aggregate.update, plain_sums(sound, [0, 2, 3]).update, atol=1e-6)


def test_masked_vectors_are_added_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one comes, nothing but the sum is left of those before."""
    monkeypatch.setattr("fedexp.flower.secure_round.SUMMED_BYTES", 8_000)  # one vector
    came, held = list[Any](), list[int]()

    def look(message: Message) -> None:
        told = message.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in told:
            held.append(sum(len(each[Key.MASKED_PARAMETERS][1]) > 8_000 for each in came))
            came.append(told)

    grid = FakeGrid(app_of(random_updates(1_000)), 6)
    grid.taps.append(look)
    assert len(secure_round(server_of(1_000), grid, SECURE).accepted) == 6
    assert held == [0] * 6


def test_a_clip_far_too_wide_is_told(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(app_of(random_updates(1000)), 3)
    with caplog.at_level(logging.WARNING, "flwr"):
        gathered = secure_round(server_of(1000), grid, SecureAggregation(clip=1e7))
    assert gathered.metrics["rounding_share"] > 1e-3
    assert "lower clip" in caplog.text


def batch_norm_app(change: float) -> ClientApp:
    app = ClientApp(mods=[secure_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = ndarrays(message.content.array_records["arrays"])
        arrays["w"] = arrays["w"] - np.float32(0.1)
        arrays["running_mean"] = arrays["running_mean"] + np.float32(change * client)
        arrays["batches"] = np.asarray(arrays["batches"] + client)
        named = ArrayRecord({name: Array(value) for name, value in arrays.items()})
        return Message(RecordDict({"arrays": named}), reply_to=message)

    return app


def batch_norm_server() -> Server:
    model: dict[str, np.ndarray] = {
        "w": np.zeros(3, np.float32),
        "running_mean": np.full(2, 5, np.float32),
        "batches": np.zeros((), np.int64),
    }
    return Server(fedavg(), ArrayRecord({name: Array(value) for name, value in model.items()}))


def test_statistics_of_batch_norm_are_averaged_inside_the_sum() -> None:
    server = batch_norm_server()
    secure = SecureAggregation(clip=1.0, extras_bound=1.0)
    gathered = secure_round(server, FakeGrid(batch_norm_app(0.3), 4), secure)
    server.step(gathered.aggregate, 4)
    model = {name: array.numpy() for name, array in server.model().items()}
    assert model["running_mean"] == pytest.approx([5.45] * 2, rel=1e-6)
    assert model["w"] == pytest.approx([-0.1] * 3, rel=1e-6)
    assert model["batches"] == 0


def test_statistics_that_change_beyond_their_bound_drop_the_client_out() -> None:
    grid = FakeGrid(batch_norm_app(0.3), 5)
    gathered = secure_round(batch_norm_server(), grid, SecureAggregation(1.0, extras_bound=1.0))
    assert positions(grid, gathered.accepted) == [0, 1, 2, 3]


def test_settings_that_a_secure_sum_cannot_meet_are_refused_before_the_first_round() -> None:
    layout = server_of(10).layout
    sgd, control = fedexp().client, scaffold_exp().client
    SECURE.check(sgd, layout, "uniform", 3)
    with pytest.raises(UsageError, match="weighting='uniform'"):
        SECURE.check(sgd, layout, "num-examples", 3)
    with pytest.raises(UsageError, match="at least 3 clients"):
        SECURE.check(sgd, layout, "uniform", 2)
    with pytest.raises(UsageError, match="control would have to be summed too: set extras_bound"):
        SECURE.check(control, layout, "uniform", 3)
    with pytest.raises(UsageError, match="buffers would have to be"):
        SECURE.check(sgd, batch_norm_server().layout, "uniform", 3)
    SecureAggregation(1.0, extras_bound=1.0).check(control, layout, "uniform", 3)
    wide = Layout.of({"w": np.broadcast_to(np.float32(0), (10**9,))})
    with pytest.raises(UsageError, match="fewer clients per round"):
        SECURE.check(sgd, wide, "uniform", 10**6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clip": 0.0}, "clip must be positive"),
        ({"clip": float("nan")}, "clip must be positive"),
        ({"clip": 1.0, "extras_bound": -1.0}, "extras_bound must be positive"),
        ({"clip": 1.0, "shares": 4}, "an odd number"),
        ({"clip": 1.0, "threshold": 0.5}, "threshold must be in"),
        ({"clip": 1.0, "fewest": 2}, "fewest must be at least 3"),
    ],
)
def test_settings_without_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        SecureAggregation(**options)


def test_a_client_may_ask_for_more_company_than_the_server() -> None:
    grid = FakeGrid(app_of(random_updates(4), SecureMod(fewest=6)), 5)
    gathered = secure_round(server_of(4), grid, SECURE)
    assert gathered.dropped == 5
    assert gathered.aggregate.count == 0


def test_a_client_helps_to_unmask_no_sum_of_fewer_than_it_asks_for() -> None:
    """All five begin, one is lost, and the server, which would take three, gets no shares."""
    grid = FakeGrid(app_of(random_updates(4), SecureMod(fewest=5)), 5)
    grid.nodes[0].fault = at_stage(Stage.COLLECT_MASKED_VECTORS, raises)
    gathered = secure_round(server_of(4), grid, SECURE)
    assert (gathered.dropped, gathered.aggregate.count.item()) == (5, 0)
    grid.nodes[0].fault = healthy
    assert len(secure_round(server_of(4), grid, SECURE, 2).accepted) == 5


@pytest.mark.parametrize("told", [{}, {Key.STAGE: Stage.COLLECT_MASKED_VECTORS}])
@pytest.mark.parametrize("kind", ["train", "train.default"])
def test_a_secure_client_refuses_to_reply_in_the_clear(kind: str, told: dict[str, str]) -> None:
    """Flower's mod leaves alone what is not called "train", and the app would answer it."""
    grid, server = FakeGrid(app_of(random_updates(4)), 1), server_of(4)
    content = RecordDict({"arrays": server.model(), "config": ConfigRecord({"server-round": 1})})
    if told:
        content[RECORD_KEY_CONFIGS] = ConfigRecord(dict(told))
        payload = SECURE.payload(server.algorithm.client, server.layout, 3)
        content[PAYLOAD] = payload_config(payload, server.layout, "arrays")
        terms = {"clipping_range": 1.0, "max_weight": 1.0, "target_range": payload.levels}
        state = grid.nodes[0].context.state
        state[RECORD_KEY_STATE] = ConfigRecord({**terms, "current_stage": Stage.SETUP})
    node = grid.nodes[0].node_id
    asked = Message(content=content, message_type=kind, dst_node_id=node, group_id="1")
    (reply,) = grid.send_and_receive([asked])
    assert not reply.has_content()
    if kind == "train.default" or not told:
        assert "secure sums only" in str(reply.error.reason)


SETUP = {
    Key.STAGE: Stage.SETUP,
    Key.SAMPLE_NUMBER: 5,
    Key.SHARE_NUMBER: 5,
    Key.THRESHOLD: 3,
    Key.CLIPPING_RANGE: 1.0,
    Key.TARGET_RANGE: 2**20,
    Key.MOD_RANGE: 2**32,
    Key.MAX_WEIGHT: 1.0,
}
UNMASK = {
    Key.STAGE: Stage.UNMASK,
    Key.ACTIVE_NODE_ID_LIST: [1, 2, 3],
    Key.DEAD_NODE_ID_LIST: [3, 4],
}


@pytest.mark.parametrize(
    ("told", "refusal"),
    [
        (SETUP, None),
        ({**SETUP, Key.SAMPLE_NUMBER: 2}, "at least 3 clients"),
        ({**SETUP, Key.SHARE_NUMBER: 6}, "above half of the shares"),
        (UNMASK, "both secrets of a client"),
        ({**UNMASK, Key.ACTIVE_NODE_ID_LIST: [1, 2]}, "2 are left"),
    ],
)
def test_a_client_refuses_terms_that_would_unmask_it(told: Any, refusal: str | None) -> None:
    grid = FakeGrid(app_of(random_updates(4)), 1)
    asked = Message(
        content=RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(told)}),
        message_type="train",
        dst_node_id=grid.nodes[0].node_id,
        group_id="1",
    )
    (reply,) = grid.send_and_receive([asked])
    assert reply.has_content() == (refusal is None)
    assert refusal is None or refusal in str(reply.error.reason)
