"""Messages to nodes and their replies, as they arrive.

Flower's own `send_and_receive` collects all replies in a list and waits for every node until the
timeout. `stream_replies` yields them a few at a time, so that a server never holds many models, and
stops waiting for nodes that have left the federation; `Replies` passes them to a strategy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from logging import INFO
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.errors import UsageError, require, shown

Kind = TypeVar("Kind", ArrayRecord, ConfigRecord, MetricRecord)
MIN_POLL, MAX_POLL = 0.05, 1.0  # seconds between two polls for replies
NODE_POLL = 5.0  # seconds between two polls of the list of nodes
LONGEST_REASON = 400  # characters of a log line about a reply
UNANSWERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
READ_ONCE = (
    "replies can be read once, because the server never holds all of them; where aggregate_train "
    "or aggregate_evaluate reads them itself, begin with replies = list(replies)"
)


class Replies(Iterable[Message]):
    """Replies as they arrive; a second pass is refused.

    Args:
        stream: of the replies.
        count: how many there will be at most.
    """

    def __init__(self, stream: Iterator[Message], count: int) -> None:
        self._stream: Iterator[Message] | None = stream
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Message]:
        stream, self._stream = self._stream, None
        if stream is None:
            raise UsageError(READ_ONCE)
        return stream


def stream_replies(
    grid: Grid,
    messages: Iterable[Message],
    timeout: float,
    chunk: int = 1,
    quorum: int | None = None,
) -> Iterator[Message]:
    """Send the messages and yield exactly one reply to each: an error reply where none arrived.

    With a quorum, nothing is yielded for the nodes that are not waited for.

    Args:
        grid: of the ServerApp.
        messages: one per node.
        timeout: seconds in total, sending included.
        chunk: replies held in memory at a time.
        quorum: replies with content after which no more are waited for; None for all.
    """
    end = time.monotonic() + timeout
    pushed = list(messages)
    sent_ids = set(grid.push_messages(pushed))
    waiting = {m.metadata.message_id: m for m in pushed if m.metadata.message_id in sent_ids}
    for message in pushed:
        if message.metadata.message_id not in sent_ids:
            yield _error_reply(message, "the message to it could not be sent")
    departed, pause, answers = _DepartedNodes(grid), MIN_POLL, 0
    while waiting:
        ids = list(waiting)
        for start in range(0, len(ids), chunk):
            for reply in grid.pull_messages(ids[start : start + chunk]):
                sent = waiting.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:
                    pause, answers = MIN_POLL, answers + reply.has_content()
                    yield _attributed(reply, sent)
            if quorum is not None and answers >= quorum and waiting:
                text = "%d of %d nodes have answered, as many as the quorum needs: the others are "
                log(INFO, text + "not waited for", answers, len(pushed))
                return
            if time.monotonic() >= end:
                break
        for message_id in departed.poll(waiting):
            yield _error_reply(waiting.pop(message_id), "it has left the federation")
        left = end - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(pause, left))
            pause = min(2 * pause, MAX_POLL)
    for message in waiting.values():
        yield _error_reply(message, f"it did not answer within {timeout:g} s")


def is_unanswered(reply: Message) -> bool:
    """Return whether a reply only reports that its node did not answer."""
    return reply.has_error() and reply.error.code in UNANSWERED


def reply_content(reply: Message) -> RecordDict:
    """Return the content of a reply; raise `UsageError` for an error reply."""
    if reply.has_error():
        reason = str(reply.error.reason or f"error {reply.error.code}").strip()
        raise UsageError(reason.splitlines()[-1] if reason else "an error without a reason")
    return reply.content


def reason_of(error: UsageError) -> str:
    """Return why a reply is left out, in one line whatever the client sent."""
    return shown(error, LONGEST_REASON)


def only_record(records: Mapping[str, Kind], what: str, key: str | None = None) -> tuple[str, Kind]:
    """Return the key and the record of this key, or those of the only one from another package."""
    others = {name: record for name, record in records.items() if not name.startswith("fedexp.")}
    if key is not None and key in others:
        return key, others[key]
    missing = "not one" if key is None else f"and none called {key!r}"
    require(len(others) == 1, f"there are {len(others)} records with a {what}, {missing}")
    return next(iter(others.items()))


class _DepartedNodes:
    """Detects nodes that have left: those missing from two consecutive polls of the node list."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self._missing = grid, set[int]()
        self._polled = time.monotonic()

    def poll(self, waiting: dict[str, Message]) -> list[str]:
        """Return the ids of messages to nodes that have left; [] between two polls."""
        if not waiting or time.monotonic() - self._polled < NODE_POLL:
            return []
        self._polled = time.monotonic()
        nodes = {key: message.metadata.dst_node_id for key, message in waiting.items()}
        missing = set(nodes.values()) - set(self.grid.get_node_ids())
        departed, self._missing = missing & self._missing, missing
        return [key for key, node in nodes.items() if node in departed]


def _attributed(reply: Message, message: Message) -> Message:
    """Return the reply with its node as the source; errors of the SuperLink itself lack it."""
    if reply.has_error() and reply.metadata.src_node_id != message.metadata.dst_node_id:
        return Message(reply.error, reply_to=message)
    return reply


def _error_reply(message: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)
