"""A secure round gives the plain sums, whoever drops out at whatever stage."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
)

from fedexp import fedavg, fedexp
from fedexp.flower import Server
from fedexp.flower.layout import ndarrays
from fedexp.flower.secure.client import secure_mod
from fedexp.flower.secure.payload import (
    MODULUS,
    SecureAggregation,
    levels_for,
)
from fedexp.flower.server import GRACE
from tests.flower.helpers.fake_grid import FakeGrid, Fault, healthy, raises, replies, silent
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


def test_a_round_is_reproducible_to_the_last_bit() -> None:
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
    monkeypatch.setattr("fedexp.flower.secure.round.SUMMED_BYTES", 8_000)  # one vector
    came, held = list[Any](), list[int]()

    def look(message: Message) -> None:
        record = message.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in record:
            held.append(sum(len(each[Key.MASKED_PARAMETERS][1]) > 8_000 for each in came))
            came.append(record)

    grid = FakeGrid(app_of(random_updates(1_000)), 6)
    grid.taps.append(look)
    assert len(secure_round(server_of(1_000), grid, SECURE).accepted) == 6
    assert held == [0] * 6


def test_a_clip_that_is_far_too_wide_is_logged(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_may_drop_out_at_any_stage(stage: str) -> None:
    update = random_updates(64)
    grid = FakeGrid(app_of(update), 5, faults={2: at_stage(stage, raises)})
    server = server_of(64)
    gathered = secure_round(server, grid, SECURE)
    counted = [0, 1, 2, 3, 4] if stage == Stage.UNMASK else [0, 1, 3, 4]
    assert positions(grid, gathered.accepted) == counted
    assert gathered.dropped == 1
    exact = plain_sums(update, counted)
    assert gathered.aggregate.count == len(counted)
    assert torch.allclose(gathered.aggregate.update, exact.update, atol=1e-6)
    assert gathered.aggregate.sq_norm.item() == pytest.approx(exact.sq_norm.item(), rel=1e-6)
    grid.nodes[2].fault = healthy  # and the next round is complete again
    assert len(secure_round(server, grid, SECURE, 2).accepted) == 5


def test_several_may_drop_out_and_each_at_another_stage() -> None:
    update = random_updates(64)
    faults = {k: at_stage(stage, raises) for k, stage in enumerate(STAGES)}
    faults[4] = faults[2]  # two that shared a mask with each other
    grid = FakeGrid(app_of(update), 13, faults=faults)
    gathered = secure_round(server_of(64), grid, SecureAggregation(clip=2.0, threshold=0.51))
    counted = [3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert positions(grid, gathered.accepted) == counted
    exact = plain_sums(update, counted)
    assert torch.allclose(gathered.aggregate.update, exact.update, atol=1e-5)


def test_with_few_shares_each_client_deals_with_its_neighbours_only() -> None:
    update = random_updates(32)
    grid = FakeGrid(app_of(update), 9, faults={4: at_stage(Stage.COLLECT_MASKED_VECTORS, raises)})
    gathered = secure_round(server_of(32), grid, SecureAggregation(clip=2.0, shares=5))
    exact = plain_sums(update, [0, 1, 2, 3, 5, 6, 7, 8])
    assert torch.allclose(gathered.aggregate.update, exact.update, atol=1e-6)


def test_a_client_that_never_answers_is_waited_for_once() -> None:
    update = random_updates(16)
    grid = FakeGrid(app_of(update), 4, faults={1: at_stage(Stage.SETUP, silent)})
    gathered = secure_round(server_of(16), grid, SECURE, timeout=4)
    assert positions(grid, gathered.accepted) == [0, 2, 3]
    assert positions(grid, gathered.unanswered) == [1]
    assert gathered.dropped == 0


def test_messages_of_a_stage_do_not_outlive_it() -> None:
    """Else a node that was away would find half a day of stages, and go through them all."""
    grid, lives = FakeGrid(app_of(random_updates(4)), 3), list[float]()
    grid.taps.append(
        lambda m: lives.append(0 if m.metadata.reply_to_message_id else m.metadata.ttl)
    )
    assert len(secure_round(server_of(4), grid, SECURE, timeout=60).accepted) == 3
    assert len(lives) == 2 * 4 * 3
    assert max(lives) <= 60 + GRACE


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_the_round_is_skipped_and_training_continues(
    stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    update = random_updates(16)
    grid = FakeGrid(app_of(update), 5, faults={k: at_stage(stage, raises) for k in (0, 1)})
    server = server_of(16)
    with caplog.at_level(logging.WARNING, "flwr"):
        gathered = secure_round(server, grid, SECURE)  # 4 of 5 are needed
    assert gathered.aggregate.count == 0
    assert gathered.accepted == ()
    assert gathered.dropped == 2
    assert "3 of 5 clients are left" in caplog.text
    assert "the model is unchanged" in caplog.text
    before = server.state.params
    server.step(gathered.aggregate, 5)
    assert torch.equal(server.state.params, before)
    for node in grid.nodes:
        node.fault = healthy
    assert len(secure_round(server, grid, SECURE, 2).accepted) == 5


def test_a_sum_of_too_few_is_never_unmasked_even_with_enough_shares() -> None:
    grid = FakeGrid(app_of(random_updates(16)), 5)
    grid.nodes[0].fault = at_stage(Stage.COLLECT_MASKED_VECTORS, raises)
    stages = list[Any]()
    grid.taps.append(
        lambda m: stages.append(
            m.has_content() and m.content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE)
        )
    )
    gathered = secure_round(server_of(16), grid, SecureAggregation(clip=2.0, fewest=5))
    assert gathered.aggregate.count == 0
    assert Stage.COLLECT_MASKED_VECTORS in stages
    assert Stage.UNMASK not in stages


def _told(key: str, value: Any) -> Fault:
    def spoil(content: RecordDict) -> None:
        content.config_records[RECORD_KEY_CONFIGS][key] = value

    return replies(spoil)


JUNK = {
    "no keys": (Stage.SETUP, replies(lambda content: content.clear())),
    "no bytes": (Stage.SETUP, _told(Key.PUBLIC_KEY_1, 7)),
    "a list too short": (Stage.SHARE_KEYS, _told(Key.DESTINATION_LIST, [1])),
    "no vector": (Stage.COLLECT_MASKED_VECTORS, _told(Key.MASKED_PARAMETERS, [b"x", b"y"])),
    "a short vector": (
        Stage.COLLECT_MASKED_VECTORS,
        _told(Key.MASKED_PARAMETERS, [ndarray_to_bytes(np.zeros(1, np.int64))] * 2),
    ),
    "another weight": (
        Stage.COLLECT_MASKED_VECTORS,
        replies(
            lambda content: content.metric_records.update(
                {"fitres.num_examples": MetricRecord({"num_examples": 1000})}
            )
        ),
    ),
    "shares of others": (Stage.UNMASK, _told(Key.NODE_ID_LIST, [1, 2, 3, 4, 5])),
}


@pytest.mark.parametrize("case", JUNK)
def test_a_junk_reply_drops_its_sender_and_nobody_else(case: str) -> None:
    stage, fault = JUNK[case]
    update = random_updates(16)
    grid = FakeGrid(app_of(update), 5, faults={3: at_stage(stage, fault)})
    gathered = secure_round(server_of(16), grid, SECURE)
    counted = [0, 1, 2, 3, 4] if stage == Stage.UNMASK else [0, 1, 2, 4]
    assert positions(grid, gathered.accepted) == counted
    assert gathered.dropped == 1
    exact = plain_sums(update, counted)
    assert torch.allclose(gathered.aggregate.update, exact.update, atol=1e-6)


@pytest.mark.parametrize("stage", [Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK])
def test_a_sum_whose_masks_were_not_removed_is_refused(
    stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A dishonest client can spoil a round, but not the model."""

    def lie(content: RecordDict) -> None:
        record: Any = content.config_records[RECORD_KEY_CONFIGS]
        if stage == Stage.UNMASK:
            record[Key.SHARE_LIST] = [bytes(len(share)) for share in record[Key.SHARE_LIST]]
        else:
            noise = np.random.default_rng(0).integers(0, 2**32, 16 + 3)
            record[Key.MASKED_PARAMETERS][1] = ndarray_to_bytes(noise)

    grid = FakeGrid(app_of(random_updates(16)), 4, faults={0: at_stage(stage, replies(lie))})
    with caplog.at_level(logging.WARNING, "flwr"):
        gathered = secure_round(server_of(16), grid, SECURE)
    assert gathered.aggregate.count == 0
    assert "the model is unchanged" in caplog.text


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # as in production
def test_weights_that_sum_to_zero_spoil_the_round_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The mean over a weight of 0 is not a number, which ended the run."""

    def lie(content: RecordDict) -> None:
        masked: Any = content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
        weight = (bytes_to_ndarray(masked[0]) - 4 * levels_for(4)) % MODULUS
        masked[0] = ndarray_to_bytes(weight)

    fault = at_stage(Stage.COLLECT_MASKED_VECTORS, replies(lie))
    grid = FakeGrid(app_of(random_updates(16)), 4, faults={0: fault})
    with caplog.at_level(logging.WARNING, "flwr"):
        gathered = secure_round(server_of(16), grid, SECURE)
    assert gathered.aggregate.count == 0
    assert "the model is unchanged" in caplog.text


def test_too_few_nodes_skip_the_round(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(app_of(random_updates(4)), 2)
    with caplog.at_level(logging.WARNING, "flwr"):
        assert secure_round(server_of(4), grid, SECURE).aggregate.count == 0
    assert "needs 3 clients, and there are 2" in caplog.text
