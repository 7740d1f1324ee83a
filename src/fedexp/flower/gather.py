"""`receive`: the replies to some messages, as they arrive, and none too late.

Flower's own loop collects all replies in a list and waits for every node until the timeout. This
one hands them over a few at a time, so that a server never holds many models, and waits for no node
that has left.

`gather`: the replies of a round as sums. No more than a few models are held at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import torch
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.engine.loop import SUMMED_BYTES
from fedexp.flower.replies import Contribution, Reader, Tally, UnusableReply, warn_left_out

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


MOST_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a round's clients brought.

    Attributes:
        aggregate: the sums.
        accepted: the nodes whose replies are in them.
        dropped: replies that were left out because they could not be used.
        unanswered: the nodes that did not answer.
        client_metrics: the means of what clients told.
        metrics: further numbers for the round's record.
        longest: the node with the longest update, and its norm.
        rules: by node, the client rule that a reply says it was trained by; None where it does not.
    """

    aggregate: Aggregate
    accepted: tuple[int, ...] = ()
    dropped: int = 0
    unanswered: tuple[int, ...] = ()
    client_metrics: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    longest: tuple[int, float] | None = None
    rules: dict[int, str | None] = field(default_factory=dict)


class Sums:
    """Adds contributions a few at a time, as the simulator does.

    Args:
        params: the model, for its size and type.
        clip: applied to every update before it is summed.
    """

    def __init__(self, params: Tensor, clip: Callable[[Tensor], Tensor] | None = None) -> None:
        self.total = Aggregate.zero(params.numel(), params.dtype)
        self.clip, self._at_once = clip, held_at_once(params)
        self._pending: list[Contribution] = []

    def add(self, one: Contribution) -> None:
        self._pending.append(one)
        if len(self._pending) >= self._at_once:
            self._flush()

    def finished(self) -> Aggregate:
        self._flush()
        return self.total

    def _flush(self) -> None:
        if not self._pending:
            return
        some, self._pending = self._pending, []
        deltas = torch.stack([one.delta for one in some])
        extras = {name: torch.stack([one.extras[name] for one in some]) for name in some[0].extras}
        weights = [one.weight for one in some]
        part = Aggregate.of(self.clip(deltas) if self.clip else deltas, weights, extras)
        self.total = self.total + part


def gather(
    replies: Iterable[Message],
    reader: Reader,
    tell: Callable[[RecordDict], None] | None = None,
    clip: Callable[[Tensor], Tensor] | None = None,
) -> Gathered:
    """Sum the replies that can be used; say of each other which node it is from, and why not.

    Args:
        replies: in any order, read once.
        reader: checks them.
        tell: hears the metrics of every reply that is used, without its arrays.
        clip: applied to every update before it is summed.
    """
    sums: Sums | None = None  # the first usable replies may change the layout
    tally, longest = Tally(reader.weight_key), None
    rules: dict[int, str | None] = {}
    accepted, unanswered, dropped = [], [], 0  # a node that replies twice is in it twice
    for reply in reader.settled(replies):
        node = reply.metadata.src_node_id
        try:
            one = reader.read(reply)
        except UnusableReply as error:
            log(WARNING, "node %d is left out of this round: %s", node, error)
            unanswered += [node] if is_unanswered(reply) else []
            dropped += not is_unanswered(reply)
            continue
        sums = sums or Sums(reader.start, clip)
        sums.add(one)
        warn_left_out(node, tally.add(one.metrics))
        if tell is not None:
            tell(RecordDict(dict(reply.content.metric_records)))
        accepted.append(node)
        rules[node] = one.rule
        if longest is None or one.norm > longest[1]:
            longest = node, one.norm
    return Gathered(
        (sums or Sums(reader.start)).finished(),
        tuple(accepted),
        dropped,
        tuple(unanswered),
        tally.means(),
        longest=longest,
        rules=rules,
    )


def held_at_once(params: Tensor) -> int:
    """How many models of this size may be held together; one where one is large."""
    return max(1, min(MOST_AT_ONCE, SUMMED_BYTES // max(1, params.nbytes)))
