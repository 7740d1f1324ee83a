"""`receive`: the replies to some messages, as they arrive, and none too late.

Flower's own loop collects all replies in a list and waits for every node until the timeout. This
one hands them over a few at a time, so that a server never holds many models, and waits for no node
that has left.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two looks for replies
ROLL_CALL = 5.0  # seconds between two looks at who is still there
UNANSWERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}


def receive(
    grid: Grid, messages: Iterable[Message], timeout: float, at_once: int = 1
) -> Iterator[Message]:
    """Send the messages, and yield exactly one reply to each: an error where none came.

    Args:
        grid: of the ServerApp.
        messages: what to send, one to a node.
        timeout: seconds for all of it, sending included.
        at_once: replies held at a time.
    """
    end = time.monotonic() + timeout
    waiting = _sent(grid, messages)
    yield from _refused(waiting)
    present, pause = Presence(grid), FIRST_PAUSE
    while waiting:
        for names in _groups(list(waiting), at_once):
            for reply in grid.pull_messages(names):
                origin = waiting.pop(reply.metadata.reply_to_message_id, None)
                if origin is not None:
                    pause = FIRST_PAUSE
                    yield _attributed(reply, origin)
            if time.monotonic() >= end:
                break
        for name in present.gone(waiting):
            yield _error(waiting.pop(name), "it has left the federation")
        left = end - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
    for origin in waiting.values():
        yield _error(origin, f"it did not answer within {timeout:g} s")


def is_unanswered(reply: Message) -> bool:
    """Whether a reply only says that there is none."""
    return reply.has_error() and reply.error.code in UNANSWERED


class Presence:
    """Who has left: nodes that were missing from the grid's list in two looks, some time apart."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self._missing = grid, set[int]()
        self._looked = time.monotonic()

    def gone(self, waiting: dict[str, Message]) -> list[str]:
        """The messages whose nodes are there no more; none between two looks."""
        if not waiting or time.monotonic() - self._looked < ROLL_CALL:
            return []
        self._looked = time.monotonic()
        there = set(self.grid.get_node_ids())
        nodes = {name: message.metadata.dst_node_id for name, message in waiting.items()}
        missing = set(nodes.values()) - there
        left, self._missing = missing & self._missing, missing
        return [name for name, node in nodes.items() if node in left]


def _sent(grid: Grid, messages: Iterable[Message]) -> dict[str, Message]:
    """The messages by their ids; those that the grid refused have ids that begin with a dash."""
    pushed = list(messages)
    taken = set(grid.push_messages(pushed))
    named: dict[str, Message] = {}
    for k, message in enumerate(pushed):
        name = message.metadata.message_id
        named[name if name in taken else f"-{k}"] = message
    return named


def _refused(waiting: dict[str, Message]) -> Iterator[Message]:
    for name in [name for name in waiting if name.startswith("-")]:
        yield _error(waiting.pop(name), "the message to it could not be sent")


def _attributed(reply: Message, origin: Message) -> Message:
    """A reply that says which node it is about; errors of the SuperLink itself do not."""
    if reply.has_error() and reply.metadata.src_node_id != origin.metadata.dst_node_id:
        return Message(reply.error, reply_to=origin)
    return reply


def _error(origin: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=origin)


def _groups(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))
