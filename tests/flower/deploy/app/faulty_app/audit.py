"""FedExP that also writes the replies of each round and its model to a folder (tools/chaos.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from fedexp.flower import FedExP
from fedexp.flower.replies import AggregatedReplies


class AuditedFedExP(FedExP):
    """One file `round-N.npz` per round, in place only when it is complete.

    It has the arrays of the model before and after the round (`start/NAME`, `model/NAME`), those of
    reply K (`K/NAME`), and of all nodes that were sent the model, in the order of their replies:
    `nodes`; `weights` (`num-examples`), 0 where there is no reply with content; `accepted`, whether
    it is in the sums.
    """

    def __init__(self, audit: Path, **options: Any) -> None:
        super().__init__(**options)
        self.audit, self.accepted = audit, frozenset[int]()
        audit.mkdir(parents=True, exist_ok=True)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self.run is not None
        named, seen = _named("start", self.run.model()), list[Message]()
        result = super().aggregate_train(server_round, _watched(replies, seen))
        weights = np.zeros(len(seen))
        for k, reply in enumerate(seen):
            if reply.has_content():
                named |= _named(str(k), reply.content.array_records["arrays"])
                (metrics,) = reply.content.metric_records.values()
                weights[k] = metrics["num-examples"]
        nodes = [reply.metadata.src_node_id for reply in seen]
        accepted = [node in self.accepted for node in nodes]
        named |= _named("model", self.run.model())
        named |= {"nodes": np.array(nodes, np.uint64), "accepted": np.array(accepted, bool)}
        partial = self.audit / "partial.npz"
        np.savez(partial, allow_pickle=False, weights=weights, **named)
        partial.rename(self.audit / f"round-{server_round}.npz")
        return result

    def complete_train(self, replies: AggregatedReplies) -> tuple[ArrayRecord | None, MetricRecord]:
        self.accepted = frozenset(replies.accepted)
        return super().complete_train(replies)


def _watched(replies: Iterable[Message], seen: list[Message]) -> Iterator[Message]:
    for reply in replies:
        seen.append(reply)
        yield reply


def _named(prefix: str, arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {f"{prefix}/{name}": array.numpy() for name, array in arrays.items()}
