"""Replies as they arrive: few in memory, none after the timeout, none awaited from lost nodes."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto

from fedexp.flower import FedAvg, transport
from fedexp.flower.transport import is_unanswered, stream_replies
from tests.flower.helpers import fake_grid
from tests.flower.helpers.fake_grid import FakeGrid, only, raises, silent
from tests.flower.helpers.plain_app import first_model, plain_app

BAD = 1  # the position of the node that misbehaves


def messages(grid: FakeGrid) -> list[Message]:
    record = RecordDict({"arrays": first_model()})
    return [Message(record, node.node_id, "train") for node in grid.nodes]


def test_every_message_gets_one_reply_or_an_error() -> None:
    grid = FakeGrid(plain_app(), 4, faults={1: silent, 2: raises})
    came = {
        grid.position(reply.metadata.src_node_id): reply
        for reply in stream_replies(grid, messages(grid), 0.2, chunk=3)
    }
    assert came.keys() == {0, 1, 2, 3}
    assert came[0].has_content()
    assert came[3].has_content()
    assert is_unanswered(came[1])
    assert came[1].error.reason == "it did not answer within 0.2 s"
    assert came[2].error.reason == "boom"
    assert not is_unanswered(came[2])


def test_nodes_that_left_are_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NODE_POLL", 0.05)
    grid = FakeGrid(plain_app(), 3)
    grid.nodes[1].online = False
    start = time.monotonic()
    came = list(stream_replies(grid, messages(grid), timeout=600))
    assert time.monotonic() - start < 60
    (lost,) = [reply for reply in came if reply.has_error()]
    assert lost.metadata.src_node_id == grid.nodes[1].node_id
    assert lost.error.reason == "it has left the federation"


def test_a_node_missing_from_one_list_only_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NODE_POLL", 0.05)
    grid = FakeGrid(plain_app(), 2)
    looks = iter([[], *([[n.node_id for n in grid.nodes]] * 1000)])
    monkeypatch.setattr(grid, "get_node_ids", lambda: next(looks))
    grid.nodes[1].fault = silent
    reasons = [r.error.reason for r in stream_replies(grid, messages(grid), 0.5) if r.has_error()]
    assert reasons == ["it did not answer within 0.5 s"]


def test_messages_that_the_grid_refuses_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = FakeGrid(plain_app(), 3)
    push = grid.push_messages
    monkeypatch.setattr(grid, "push_messages", lambda m: ["", *list(push(m))[1:]])
    came = list(stream_replies(grid, messages(grid), 5))
    assert [r.has_error() for r in came] == [True, False, False]
    assert came[0].metadata.src_node_id == grid.nodes[0].node_id


def test_errors_of_the_superlink_are_attributed_to_their_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = FakeGrid(plain_app(), 1)

    def lost(message: Message, answer: Any) -> Message:
        reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "lost"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    grid.nodes[0].fault = lost
    (reply,) = stream_replies(grid, messages(grid), 5)
    assert reply.metadata.src_node_id == grid.nodes[0].node_id
    assert is_unanswered(reply)


def test_a_server_never_holds_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty clients of a model as large as what may be held: few replies are alive at a time."""
    alive: weakref.WeakSet[Message] = weakref.WeakSet()
    most = 0

    def counted(proto: Any) -> Message:
        nonlocal most
        message = message_from_proto(proto)
        if message.metadata.reply_to_message_id:
            alive.add(message)
            most = max(most, len(alive))
        return message

    def reply(message: Message, answer: Any) -> Message:
        content = RecordDict({"arrays": model})
        return Message(content, reply_to=message)

    model = ArrayRecord({"w": Array(np.ones(1000, np.float32))})
    monkeypatch.setattr("fedexp.flower.replies.SUMMED_BYTES", 4000)
    monkeypatch.setattr(fake_grid, "message_from_proto", counted)
    grid = FakeGrid(plain_app(), 60, faults=dict.fromkeys(range(60), reply))
    result = FedAvg(fraction_evaluate=0.0, weighting="uniform").start(grid, model, 1)
    assert result.train_metrics_clientapp[1]["clients"] == 60
    assert most <= 3


def test_a_silent_node_is_waited_for_until_the_timeout_only() -> None:
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(silent)})
    result = FedAvg().start(grid, first_model(), 1, timeout=0.3)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["clients"], metrics["dropped"], metrics["unanswered"]) == (2, 0, 1)


def test_a_quorum_ends_the_round_before_the_timeout() -> None:
    """An error is no answer, and a node that is not waited for is not backed off."""
    faults = {0: silent, 1: raises}
    grid = FakeGrid(plain_app(), 5, faults=faults)
    start = time.monotonic()
    came = list(stream_replies(grid, messages(grid), timeout=600, quorum=3))
    assert time.monotonic() - start < 60
    nodes = [grid.position(reply.metadata.src_node_id) for reply in came]
    assert (nodes, [reply.has_content() for reply in came]) == ([1, 2, 3, 4], [False, *[True] * 3])
    late = FakeGrid(plain_app(), 3, faults={BAD: silent})
    result = FedAvg(quorum=2).start(late, first_model(), 2, timeout=600)
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"], metrics["unanswered"]) == (2, 0, 0)
    assert late.sent.count(("train", BAD)) == late.sent.count(("evaluate", BAD)) == 2


def test_a_quorum_uses_all_replies_that_came_with_the_last_one_it_needs() -> None:
    grid = FakeGrid(plain_app(), 5)
    assert len(list(stream_replies(grid, messages(grid), 60, chunk=2, quorum=3))) == 4
    assert len(list(stream_replies(grid, messages(grid), 60, chunk=2, quorum=9))) == 5
