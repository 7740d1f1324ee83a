"""A grid for the four stages of SecAgg+: sound replies only, in time, and summed as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import WARNING
from time import monotonic
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray

from fedexp.engine.loop import SUMMED_BYTES
from fedexp.flower.replies import UnusableReply, content_of
from fedexp.flower.secure_legacy import (
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
    bytes_to_ndarray,
    ndarray_to_bytes,
)
from fedexp.flower.secure_payload import MODULUS
from fedexp.flower.stream import is_unanswered, receive
from fedexp.flower.training import GRACE

Masked = list[NDArray[np.int64]]

LONGEST_WAIT = 300.0  # seconds for a stage in which nobody trains; a node may have to start first
STAGES = {
    Stage.SETUP: "before it sent its keys",
    Stage.SHARE_KEYS: "before it shared its keys",
    Stage.COLLECT_MASKED_VECTORS: "before it sent its masked update",
    Stage.UNMASK: "before the sum was unmasked",
}


@dataclass
class StageGrid:
    """What Flower's workflow talks to instead of the grid, for one round.

    Args:
        grid: the real one.
        size: how many numbers a client masks.
        timeout: seconds for the whole round.

    Attributes:
        refused: nodes that dropped out with an error or a reply that cannot be used.
        unanswered: nodes that dropped out without a word.
    """

    grid: Grid
    size: int
    timeout: float
    refused: list[int] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = monotonic()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Flower's own: what is not in the list dropped out."""
        asked = {message.metadata.dst_node_id: message for message in messages}
        if not asked:
            return []
        stage = str(_protocol(next(iter(asked.values())))[Key.STAGE])
        training = stage == Stage.COLLECT_MASKED_VECTORS
        at_once = max(1, SUMMED_BYTES // (8 * self.size)) if training else len(asked)
        limit = self._limit(stage)
        for message in asked.values():
            message.metadata.ttl = limit + GRACE  # a node that comes back later need not begin
        replies = receive(self.grid, asked.values(), limit, at_once)
        sound = self._sound(stage, asked, replies)
        return _folded(sound) if training else list(sound)

    def _limit(self, stage: str) -> float:
        """Seconds for a stage, so that the round ends in time and every later one has its share."""
        left = max(0.0, self.timeout - (monotonic() - self._began))
        if stage == Stage.UNMASK:
            return left
        if stage == Stage.COLLECT_MASKED_VECTORS:
            return max(left / 2, left - min(LONGEST_WAIT, self.timeout / 5))
        return min(LONGEST_WAIT, left / 2)

    def _sound(
        self, stage: str, asked: dict[int, Message], replies: Iterable[Message]
    ) -> Iterator[Message]:
        for reply in replies:
            node = reply.metadata.src_node_id
            fault = _fault(stage, asked[node], reply, self.size)
            if fault is None:
                yield reply
                continue
            (self.unanswered if is_unanswered(reply) else self.refused).append(node)
            log(WARNING, "node %d left the secure sum %s: %s", node, STAGES[stage], fault)


def _folded(replies: Iterable[Message]) -> list[Message]:
    """The replies with their masked vectors summed into the first one's.

    Flower keeps all vectors of a round and adds them then; added as they arrive, there are never
    more than two. A nought in the place of the others leaves its sum as it is.
    """
    kept: list[Message] = []
    total: Masked | None = None
    for reply in replies:
        total = _added(total, _masked(reply))
        nought = ndarray_to_bytes(np.zeros((), np.int64))
        reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS] = [nought, nought]
        kept.append(reply)
    if total is not None:
        first = kept[0].content.config_records[RECORD_KEY_CONFIGS]
        first[Key.MASKED_PARAMETERS] = [ndarray_to_bytes(array) for array in total]
    return kept


def _added(total: Masked | None, masked: Masked) -> Masked:
    if total is None:
        return masked
    return [(a + b) & (MODULUS - 1) for a, b in zip(total, masked, strict=True)]


def _fault(stage: str, asked: Message, reply: Message, size: int) -> str | None:
    """Why a reply cannot be used; Flower's workflow would stumble over it."""
    try:
        content_of(reply)
        sound = _CHECKS[stage](asked, reply, size)
    except UnusableReply as error:
        return str(error)
    except Exception:  # what a stranger sends can make anything raise
        sound = False
    return None if sound else "its reply is damaged, or its app lacks fedexp.flower.secure_mod"


def _setup_is_sound(asked: Message, reply: Message, size: int) -> bool:
    told = _protocol(reply)
    return all(isinstance(told[key], bytes) for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))


def _shares_are_sound(asked: Message, reply: Message, size: int) -> bool:
    told = _protocol(reply)
    to, texts = told[Key.DESTINATION_LIST], told[Key.CIPHERTEXT_LIST]
    return len(to) == len(texts) and all(isinstance(text, bytes) for text in texts)


def _masks_are_sound(asked: Message, reply: Message, size: int) -> bool:
    examples = reply.content.metric_records["fitres.num_examples"]["num_examples"]
    arrays = _masked(reply)
    shapes = [array.shape for array in arrays]
    whole = all(array.dtype == np.int64 for array in arrays)
    return examples == 1 and whole and shapes == [(1,), (size,)]


def _unmasking_is_sound(asked: Message, reply: Message, size: int) -> bool:
    question, told = _protocol(asked), _protocol(reply)
    about = {*question[Key.ACTIVE_NODE_ID_LIST], *question[Key.DEAD_NODE_ID_LIST]}
    nodes, shares = told[Key.NODE_ID_LIST], told[Key.SHARE_LIST]
    return len(nodes) == len(shares) and {*nodes} <= about


_CHECKS: dict[str, Callable[[Message, Message, int], bool]] = {
    Stage.SETUP: _setup_is_sound,
    Stage.SHARE_KEYS: _shares_are_sound,
    Stage.COLLECT_MASKED_VECTORS: _masks_are_sound,
    Stage.UNMASK: _unmasking_is_sound,
}


def _protocol(message: Message) -> dict[str, Any]:
    """What Flower's protocol says in a message."""
    return dict(message.content.config_records[RECORD_KEY_CONFIGS])


def _masked(reply: Message) -> Masked:
    return [bytes_to_ndarray(data) for data in _protocol(reply)[Key.MASKED_PARAMETERS]]
