"""`gather`: the replies of a round as sums. No more than a few models are held at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.engine.loop import SUMMED_BYTES
from fedexp.flower.replies import Contribution, Reader, UnusableReply
from fedexp.flower.stream import is_unanswered
from fedexp.flower.tally import Tally, warn_left_out

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
