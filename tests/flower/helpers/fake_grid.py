"""A Flower grid in this process: a ClientApp for each node, messages through bytes, faults at will.

A client runs when its reply is pulled, so the grid itself never holds a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from time import monotonic, sleep
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Answer = Callable[[], Message]
Fault = Callable[[Message, Answer], Message | None]


class FakeNode:
    """A node: its id, its context, the same for all messages, and its fault."""

    def __init__(self, node_id: int, config: Mapping[str, Any], run_config: Mapping[str, Any]):
        self.node_id, self.online = node_id, True
        self.fault: Fault = healthy
        self.context = Context(1, node_id, dict(config), RecordDict(), dict(run_config))


class FakeGrid(Grid):
    """A grid of nodes that all run `app`.

    Args:
        app: the ClientApp of every node.
        nodes: how many (they get `partition-id` and `num-partitions`), or their node configs.
        faults: by position, what a node does wrong; see the functions below.
        run_config: of the contexts.
        seed: of the node ids, which are in no order, as in life.

    Attributes:
        nodes: by position; `online = False` takes one away, `fault` changes what it does.
        taps: functions that see every message in both directions.
        sent: (message type, position) of every message pushed.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Sequence[Mapping[str, Any]] = 3,
        *,
        faults: Mapping[int, Fault] | None = None,
        run_config: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        if isinstance(nodes, int):
            nodes = [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
        ids = np.random.default_rng(seed).choice(2**62, len(nodes), replace=False)
        self.app, self._run, self._numbers = app, Run.create_empty(1), count()
        self.nodes = [
            FakeNode(int(i), c, run_config or {}) for i, c in zip(ids, nodes, strict=True)
        ]
        for position, fault in (faults or {}).items():
            self.nodes[position].fault = fault
        self.taps: list[Callable[[Message], None]] = []
        self.sent: list[tuple[str, int]] = []
        self._waiting: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.nodes if node.online]

    def position(self, node_id: int) -> int:
        return next(k for k, node in enumerate(self.nodes) if node.node_id == node_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{next(self._numbers)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent.append(
                (message.metadata.message_type, self.position(message.metadata.dst_node_id))
            )
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        pulled = [name for name in message_ids if name in self._waiting]
        return [reply for name in pulled if (reply := self._answer(name)) is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        waiting = list(self.push_messages(messages))  # in order, so that sums are the same
        end, replies = monotonic() + (timeout or 1e9), list[Message]()
        while waiting and monotonic() < end:
            came = list(self.pull_messages(waiting))
            replies += came
            answered = {reply.metadata.reply_to_message_id for reply in came}
            waiting = [name for name in waiting if name not in answered]
            sleep(0.01 if waiting else 0)
        return replies

    def _answer(self, name: str) -> Message | None:
        message = self._waiting[name]
        node = self.nodes[self.position(message.metadata.dst_node_id)]
        if not node.online:
            return None
        received = self._through_bytes(message)
        reply = node.fault(received, lambda: self._call(received, node))
        if reply is None:
            return None
        del self._waiting[name]
        return self._through_bytes(reply)

    def _call(self, message: Message, node: FakeNode) -> Message:
        """As Flower does it: an exception becomes an error reply."""
        try:
            return self.app(message, node.context)
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)

    def _through_bytes(self, message: Message) -> Message:
        data = message_to_proto(message).SerializeToString()
        carried = message_from_proto(ProtoMessage.FromString(data))
        for tap in self.taps:
            tap(carried)
        return carried


def healthy(message: Message, answer: Answer) -> Message | None:
    """No fault at all."""
    return answer()


def silent(message: Message, answer: Answer) -> Message | None:
    """Never answers."""
    return None


def raises(message: Message, answer: Answer) -> Message | None:
    """Its ClientApp raises."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom"), reply_to=message)


def lost(message: Message, answer: Answer) -> Message | None:
    """It trains, but its reply never arrives."""
    answer()
    return None


def replies(change: Callable[[RecordDict], None]) -> Fault:
    """Trains as the others do; `change` spoils what it replies."""

    def fault(message: Message, answer: Answer) -> Message | None:
        reply = answer()
        if reply.has_content():
            change(reply.content)
        return reply

    return fault


def with_array(name: str, value: Any) -> Callable[[RecordDict], None]:
    """Return a change for `replies`: another value for an array of the model."""

    def change(content: RecordDict) -> None:
        content.array_records["arrays"][name] = Array(value)

    return change


def with_metric(name: str, value: Any) -> Callable[[RecordDict], None]:
    """Return a change for `replies`: another value for a metric."""

    def change(content: RecordDict) -> None:
        content.metric_records["metrics"][name] = value

    return change


def only(fault: Fault, *, rounds: Iterable[int] | None = None, kind: str = "train") -> Fault:
    """A fault in some rounds only, and in messages of one type only."""
    chosen = None if rounds is None else set(rounds)

    def sometimes(message: Message, answer: Answer) -> Message | None:
        config: Mapping[str, Any] = next(iter(message.content.config_records.values()), {})
        hit = chosen is None or config.get("server-round") in chosen
        return (fault if hit and message.metadata.message_type == kind else healthy)(
            message, answer
        )

    return sometimes


class Killed(Exception):
    """Stands for the death of the server process."""


def dies_on(kind: str, round: int) -> Fault:
    """The server dies while this node answers a message of a type and round."""

    def fault(message: Message, answer: Answer) -> Message | None:
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        if message.metadata.message_type == kind and config.get("server-round") == round:
            answer()
            raise Killed
        return answer()

    return fault
