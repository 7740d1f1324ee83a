"""Secure sums reveal nothing of one client; settings that would are refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.serde import message_from_proto, message_to_proto

from fedexp.flower.secure.client import SecureMod, secure_mod
from fedexp.flower.secure.payload import (
    PAYLOAD,
    Payload,
    SecureAggregation,
    levels_for,
    payload_config,
)
from tests.flower.helpers.fake_grid import FakeGrid, healthy, raises
from tests.flower.helpers.secure import (
    app_of,
    at_stage,
    random_updates,
    secure_round,
    server_of,
)

CLIENTS, DIM, CLIP = 5, 400, 0.65
UPDATE = random_updates(DIM)  # norms 0.4 to 0.8: some are clipped, some are not
SECURE = SecureAggregation(clip=2.0)
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


@dataclass
class Captured:
    """All messages that clients sent in a round, and the sums that came of it."""

    messages: list[Message]
    count: float

    def masked(self) -> list[np.ndarray]:
        records: list[Any] = [m.content.config_records[RECORD_KEY_CONFIGS] for m in self.messages]
        vectors = (each[Key.MASKED_PARAMETERS] for each in records if Key.MASKED_PARAMETERS in each)
        return [bytes_to_ndarray(data[1]) for data in vectors]


def capture(app: ClientApp, nodes: int = CLIENTS) -> Captured:
    grid, found = FakeGrid(app, nodes), Tap()
    grid.taps.append(found)
    gathered = secure_round(server_of(DIM), grid, SecureAggregation(clip=CLIP))
    return Captured(found.messages, gathered.aggregate.count.item())


class Tap:
    """Keeps a copy of every reply."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        if message.metadata.reply_to_message_id:
            self.messages.append(message_from_proto(message_to_proto(message)))


def secrets() -> Iterator[float]:
    """What must stay secret of any client: its model, update and norm, clipped or not, scaled."""
    payload = Payload(CLIP, levels_for(CLIENTS), DIM)
    for client in range(CLIENTS):
        update = UPDATE(client, 1).astype(float)
        norm = float(np.linalg.norm(update))
        for length in (norm, min(norm, CLIP)):
            yield from (length, length**2, length**2 / CLIP**2, length**2 / CLIP**2 / 2)
            yield from update[:50] * (length / norm)
            yield from update[:50] * (length / norm / CLIP)
        packed = payload.pack(update)
        yield from packed[np.abs(packed) > 1e-6]
        yield from (float(10 + client), 1.5 + client)  # its number of examples, its loss


def numbers(value: Any) -> Iterator[float]:
    """Every number in a message, in records however nested, and in arrays in bytes."""
    if isinstance(value, bool | int | float):
        yield float(value)
    elif isinstance(value, bytes) and value.startswith(b"\x93NUMPY"):
        yield from bytes_to_ndarray(value).ravel().astype(float)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each)
    elif hasattr(value, "values"):
        yield from numbers(list(value.values()))
    elif hasattr(value, "numpy"):
        yield from value.numpy().ravel().astype(float)


def leaks(captured: Captured) -> list[float]:
    """The secrets that are found: as numbers to six digits, as raw bytes, or in a text."""
    hidden = np.unique(np.abs([*secrets()]))
    hidden = hidden[~np.isin(hidden, [0.5, 1.0])]  # of clipped clients, where they reveal nothing
    sent = [n for m in captured.messages if m.has_content() for n in numbers(m.content)]
    near = np.abs(np.abs(sent)[:, None] - hidden) <= 1e-6 * hidden
    raw = b"".join(message_to_proto(m).SerializeToString() for m in captured.messages)
    texts = " ".join(str(m.error.reason) for m in captured.messages if m.has_error())
    written = [f"{secret:.4g}" in texts and len(f"{secret:.4g}") > 4 for secret in hidden]
    bare = [struct.pack("<d", s) in raw or struct.pack("<d", -s) in raw for s in hidden]
    pieces = (UPDATE(c, 1)[k : k + 2] for c in range(CLIENTS) for k in range(0, 100, 2))
    pairs = [float(p[0]) for p in pieces if p.tobytes() in raw or (-p).tobytes() in raw]
    return [*hidden[near.any(axis=0) | written | bare], *pairs]


def improbable(values: np.ndarray, bins: int = 32) -> float:
    """The chance that uniform numbers below 2**32 lie so unevenly (chi-square)."""
    seen = np.bincount((values >> 27).astype(int), minlength=bins)
    expected = len(values) / bins
    excess = float(np.square(seen - expected).sum() / expected)
    half = torch.tensor([(bins - 1) / 2, excess / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_no_update_norm_or_size_of_a_client_reaches_the_server() -> None:
    captured = capture(app_of(UPDATE))
    assert captured.count == CLIENTS
    assert len(captured.messages) == 4 * CLIENTS
    assert leaks(captured) == []


def telling(secret: str, message: Message, context: Context, call_next: ClientAppCallable) -> Any:
    """A careless client: everything as it should be, and one number more."""
    reply = secure_mod(message, context, call_next)
    if "fitres.metrics" in reply.content.config_records:
        client = int(context.node_config["partition-id"])
        norm = float(np.linalg.norm(UPDATE(client, 1)))
        leaked = {"norm": norm, "squared": norm**2, "clipped": min(norm, CLIP) ** 2}[secret]
        reply.content.config_records["fitres.metrics"][secret] = leaked
    return reply


@pytest.mark.parametrize("secret", ["norm", "squared", "clipped"])
def test_the_search_finds_a_norm_in_the_metrics(secret: str) -> None:
    captured = capture(app_of(UPDATE, partial(telling, secret)))
    assert captured.count == CLIENTS
    assert len(leaks(captured)) >= 4  # one of each client; two are clipped to the same norm


def test_the_search_finds_updates_sent_without_a_mask() -> None:
    def bare(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = secure_mod(message, context, call_next)
        if "fitres.metrics" in reply.content.config_records:
            update = UPDATE(int(context.node_config["partition-id"]), 1)
            reply.content.config_records["fitres.metrics"]["x"] = update.tobytes()
        return reply

    assert len(leaks(capture(app_of(UPDATE, bare)))) > 100


def test_the_search_finds_what_a_plain_round_reveals() -> None:
    """The same app without the mod: this is what the server sees today."""
    grid, found = FakeGrid(app_of(UPDATE, None), 1), Tap()
    grid.taps.append(found)
    config = ConfigRecord({"server-round": 1})
    content = RecordDict({"arrays": server_of(DIM).model(), "config": config})
    node = grid.nodes[0].node_id
    grid.send_and_receive(
        [Message(content=content, message_type="train", dst_node_id=node, group_id="1")]
    )
    assert len(leaks(Captured(found.messages, 1))) >= 50


def test_masked_updates_look_uniform_alone_and_against_each_other() -> None:
    masked = capture(app_of(UPDATE)).masked()
    assert len(masked) == CLIENTS
    payload = Payload(CLIP, levels_for(CLIENTS), DIM)
    bare = [(payload.pack(UPDATE(c, 1)) + 1) * payload.levels / 2 for c in range(CLIENTS)]
    assert improbable(np.concatenate(bare).astype(np.int64)) < 1e-12  # the test can fail
    assert improbable(np.concatenate(masked)) > 1e-6
    pairs = [(a - b) % 2**32 for i, a in enumerate(masked) for b in masked[:i]]
    assert min(improbable(pair) for pair in pairs) > 1e-7
    again = capture(app_of(UPDATE)).masked()
    assert min(improbable((a - b) % 2**32) for a, b in zip(masked, again, strict=True)) > 1e-7


def test_every_client_sends_the_same_weight_and_no_metrics() -> None:
    contents = [m.content for m in capture(app_of(UPDATE)).messages]
    vectors = [c for c in contents if "fitres.num_examples" in c.metric_records]
    assert [c.metric_records["fitres.num_examples"]["num_examples"] for c in vectors] == [1] * 5
    assert all(not c.config_records["fitres.metrics"] for c in vectors)
    assert all(not record for c in contents for record in c.array_records.values())


def test_error_of_a_failing_client_contains_no_data() -> None:
    def update(client: int, round: int) -> np.ndarray:
        found = UPDATE(client, round)
        if client == 2:
            raise ValueError(f"the norm is {np.linalg.norm(found)}, the first {found[:3]}")
        return np.full_like(found, np.nan) if client == 3 else found

    captured = capture(app_of(update), nodes=7)
    errors = [str(m.error.reason) for m in captured.messages if m.has_error()]
    assert captured.count == 5
    assert any("training raised ValueError" in reason for reason in errors)
    assert any("not finite" in reason for reason in errors)
    assert leaks(captured) == []


def test_a_client_may_require_more_clients_than_the_server() -> None:
    grid = FakeGrid(app_of(random_updates(4), SecureMod(fewest=6)), 5)
    gathered = secure_round(server_of(4), grid, SECURE)
    assert gathered.dropped == 5
    assert gathered.aggregate.count == 0


def test_a_client_helps_to_unmask_no_sum_of_fewer_than_it_requires() -> None:
    """All five begin, one is lost, and the server, which would take three, gets no shares."""
    grid = FakeGrid(app_of(random_updates(4), SecureMod(fewest=5)), 5)
    grid.nodes[0].fault = at_stage(Stage.COLLECT_MASKED_VECTORS, raises)
    gathered = secure_round(server_of(4), grid, SECURE)
    assert (gathered.dropped, gathered.aggregate.count.item()) == (5, 0)
    grid.nodes[0].fault = healthy
    assert len(secure_round(server_of(4), grid, SECURE, 2).accepted) == 5


@pytest.mark.parametrize("config", [{}, {Key.STAGE: Stage.COLLECT_MASKED_VECTORS}])
@pytest.mark.parametrize("kind", ["train", "train.default"])
def test_a_secure_client_refuses_to_reply_in_the_clear(kind: str, config: dict[str, str]) -> None:
    """Flower's mod leaves alone what is not called "train", and the app would answer it."""
    grid, server = FakeGrid(app_of(random_updates(4)), 1), server_of(4)
    content = RecordDict({"arrays": server.model(), "config": ConfigRecord({"server-round": 1})})
    if config:
        content[RECORD_KEY_CONFIGS] = ConfigRecord(dict(config))
        payload = SECURE.payload(server.algorithm.client, server.layout, 3)
        content[PAYLOAD] = payload_config(payload, server.layout, "arrays")
        terms = {"clipping_range": 1.0, "max_weight": 1.0, "target_range": payload.levels}
        state = grid.nodes[0].context.state
        state[RECORD_KEY_STATE] = ConfigRecord({**terms, "current_stage": Stage.SETUP})
    node = grid.nodes[0].node_id
    sent = Message(content=content, message_type=kind, dst_node_id=node, group_id="1")
    (reply,) = grid.send_and_receive([sent])
    assert not reply.has_content()
    if kind == "train.default" or not config:
        assert "secure sums only" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (SETUP, None),
        ({**SETUP, Key.SAMPLE_NUMBER: 2}, "at least 3 clients"),
        ({**SETUP, Key.SHARE_NUMBER: 6}, "above half of the shares"),
        (UNMASK, "both secrets of a client"),
        ({**UNMASK, Key.ACTIVE_NODE_ID_LIST: [1, 2]}, "2 are left"),
    ],
)
def test_a_client_refuses_settings_that_would_unmask_it(config: Any, refusal: str | None) -> None:
    grid = FakeGrid(app_of(random_updates(4)), 1)
    sent = Message(
        content=RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(config)}),
        message_type="train",
        dst_node_id=grid.nodes[0].node_id,
        group_id="1",
    )
    (reply,) = grid.send_and_receive([sent])
    assert reply.has_content() == (refusal is None)
    assert refusal is None or refusal in str(reply.error.reason)
