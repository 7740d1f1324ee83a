"""`Census`: who the nodes are, in a way that survives their restarts.

Node ids are random and change when a SuperNode starts again. Clients that say
`fedexp.flower.identify(app)` tell the server a name that stays, and their partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.flower.identity import PARTITION, QUERY
from fedexp.flower.stream import is_unanswered, receive

PATIENCE = 300.0  # seconds: the answer takes no time, but a node may have to start its app


@dataclass(frozen=True)
class Identity:
    """Who a node is; None for what it does not tell."""

    client: str | None = None
    partition: int | None = None

    @property
    def claims(self) -> set[str]:
        """What no other node should call itself."""
        return {str(told) for told in (self.client, self.partition) if told is not None}


class Census:
    """Asks every node once, one that did not answer once more, and remembers the answers."""

    def __init__(self) -> None:
        self._known: dict[int, Identity] = {}
        self._silent: set[int] = set()

    def ask(self, grid: Grid, nodes: Collection[int], timeout: float) -> None:
        """Ask the nodes that have not been asked yet. One that does not know the question, as
        plain ClientApps do not, stays nameless."""
        new = [node for node in nodes if node not in self._known]
        messages = [Message(RecordDict(), node, f"query.{QUERY}", ttl=PATIENCE) for node in new]
        for reply in receive(grid, messages, min(timeout, PATIENCE), at_once=len(new) or 1):
            node = reply.metadata.src_node_id
            if is_unanswered(reply) and node not in self._silent:
                self._silent.add(node)
            else:
                self._known[node] = _read(reply.content) if reply.has_content() else Identity()
        if new:
            self._warn_of_twins(nodes)

    def client(self, node: int) -> str | None:
        """The name of the client at a node, if it told."""
        return self._known.get(node, Identity()).client

    def clients(self, nodes: Iterable[int]) -> int:
        """How many clients these nodes are: for a minute, one that restarted is listed twice."""
        return len({self.client(node) or node for node in nodes})

    def ordered(self, nodes: Iterable[int]) -> list[int]:
        """By partition where they told it, then by id: the same order in every run of a
        federation whose nodes tell."""

        def place(node: int) -> tuple[int, int, int]:
            partition = self._known.get(node, Identity()).partition
            return (1, 0, node) if partition is None else (0, partition, node)

        return sorted(nodes, key=place)

    def _warn_of_twins(self, nodes: Iterable[int]) -> None:
        """Two nodes with the same data would count them twice, and share one client's state."""
        claimed: dict[str, list[int]] = {}
        for node in nodes:
            for claim in self._known.get(node, Identity()).claims:
                claimed.setdefault(claim, []).append(node)
        for claim, twins in claimed.items():
            if len(twins) > 1:
                told = "nodes %s all say that they are client %s; give each node a partition-id of "
                told += "its own (after a restart of a node this passes within a minute)"
                log(WARNING, told, ", ".join(map(str, sorted(twins))), claim)


def _read(content: RecordDict) -> Identity:
    told: Mapping[str, Any] = content.config_records.get("fedexp", {})
    client, partition = told.get("client"), told.get(PARTITION)
    return Identity(
        client if isinstance(client, str) else None,
        partition if isinstance(partition, int) else None,
    )
