"""The nodes of a federation: which client each one is, and which take part in a round.

Node ids are random and change when a SuperNode restarts. Clients whose app calls
`fedexp.flower.report_client_id(app)` report a permanent name and their partition; `NodeRegistry`
holds them, and refuses a second node of a name. The cohort of a round is a pure function of the
seed, the round and the available nodes; `NodeBackoff` skips nodes that did not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.engine.plan import sample_cohort
from fedexp.errors import FedExPError, UsageError, shown
from fedexp.flower.client_state import PARTITION, QUERY
from fedexp.flower.transport import is_unanswered, reason_of, reply_content, stream_replies
from fedexp.seeding import generator

QUERY_TIMEOUT = 300.0  # seconds: the reply takes no time, but a node may have to start its app
POLL = 1.0  # seconds between two polls for nodes
LOG_EVERY = 30.0  # seconds between two log lines while waiting
SECOND = (
    "node %d is refused: it reports that it is client %s, which node %d is while it is online; "
    "give each node a different partition-id (after a restart of a node this passes in a minute)"
)


class TooFewNodesError(FedExPError):
    """There were not enough nodes in time."""


@dataclass(frozen=True)
class NodeIdentity:
    """The client name and partition that a node reports; None for what it does not report."""

    client: str | None = None
    partition: int | None = None


class NodeRegistry:
    """The identities of nodes. Each node is queried once, and once more if it did not answer.

    The first node that reports a client name holds it while it is online; any other is refused.
    """

    def __init__(self) -> None:
        self._identities: dict[int, NodeIdentity] = {}
        self._holders: dict[str, int] = {}
        self._silent: set[int] = set()
        self._refused: set[int] = set()

    def query(self, grid: Grid, nodes: Collection[int], timeout: float) -> list[int]:
        """Query the nodes that have not been queried yet; return those that may take part.

        One whose ClientApp has no function for the query, as plain apps do not, stays anonymous.

        Args:
            grid: of the ServerApp.
            nodes: those that are online.
            timeout: seconds to wait for their replies.
        """
        new = [node for node in nodes if node not in self._identities]
        messages = [
            Message(RecordDict(), node, f"query.{QUERY}", ttl=QUERY_TIMEOUT) for node in new
        ]
        limit = min(timeout, QUERY_TIMEOUT)
        for reply in stream_replies(grid, messages, limit, len(new)) if new else ():
            node = reply.metadata.src_node_id
            if is_unanswered(reply) and node not in self._silent:
                self._silent.add(node)
            else:
                self._identities[node] = _identity(reply)
        online = set(nodes)
        self._holders = {name: node for name, node in self._holders.items() if node in online}
        return [node for node in nodes if self._admits(node)]

    def client(self, node: int) -> str | None:
        """Return the name of the client at a node, if it reported one and was not refused."""
        name = self._reported(node).client
        return name if name is None or self._holders.get(name) == node else None

    def sort(self, nodes: Iterable[int]) -> list[int]:
        """Sort by partition, then by id where none was reported.

        Where all nodes report their partition, the order is the same in every run.
        """

        def key(node: int) -> tuple[int, int, int]:
            partition = self._reported(node).partition
            return (1, 0, node) if partition is None else (0, partition, node)

        return sorted(nodes, key=key)

    def _reported(self, node: int) -> NodeIdentity:
        return self._identities.get(node, NodeIdentity())

    def _admits(self, node: int) -> bool:
        """Give a node its name where no other holds it; return whether the node may take part."""
        name = self._reported(node).client
        holder = node if name is None else self._holders.setdefault(name, node)
        if holder != node and node not in self._refused:
            self._refused.add(node)
            log(WARNING, SECOND, node, shown(name), holder)
        return holder == node


def _identity(reply: Message) -> NodeIdentity:
    """Return what a node reports; log why it reports nothing."""
    try:
        content = reply_content(reply)
    except UsageError as error:
        text = "node %d reports no client id (%s): its ClientApp needs report_client_id(app)"
        log(WARNING, text, reply.metadata.src_node_id, reason_of(error))
        return NodeIdentity()
    record: Mapping[str, Any] = content.config_records.get("fedexp", {})
    client, partition = record.get("client"), record.get(PARTITION)
    return NodeIdentity(
        client if isinstance(client, str) else None,
        partition if isinstance(partition, int) else None,
    )


@dataclass(frozen=True)
class CohortSize:
    """How many nodes take part in a round, by FedAvg's arguments.

    Args:
        fraction: of the available nodes.
        least: nodes in a cohort at least.
        available: nodes that must be available at least.
    """

    fraction: float
    least: int
    available: int

    def of(self, nodes: int) -> int:
        """Return the size of a cohort drawn from so many nodes."""
        return max(int(nodes * self.fraction), self.least, 1)

    def needed(self, nodes: int) -> int:
        """Return how many nodes must be available before a round starts."""
        return max(self.available, self.of(nodes))


def wait_for_nodes(
    available: Callable[[], list[int]], size: CohortSize, timeout: float
) -> list[int]:
    """Return the available nodes once they are enough; raise `TooFewNodesError` after `timeout`
    seconds."""
    end, logged = time.monotonic() + timeout, -LOG_EVERY
    while True:
        nodes = available()
        needed = size.needed(len(nodes))
        if len(nodes) >= needed:
            return nodes
        now = time.monotonic()
        if now >= end:
            raise TooFewNodesError(
                f"{len(nodes)} of {needed} nodes after waiting {timeout:g} s; start more "
                "SuperNodes, or lower min_available_nodes and min_train_nodes"
            )
        if now - logged >= LOG_EVERY:
            log(INFO, "waiting for nodes: %d of %d are available", len(nodes), needed)
            logged = now
        time.sleep(min(POLL, end - now))


def training_cohort(seed: int, round: int, nodes: Sequence[int], size: int) -> list[int]:
    """Return the nodes of a training round: the cohort that the simulator draws."""
    return [nodes[k] for k in sample_cohort(seed, round, len(nodes), size)]


def evaluation_cohort(seed: int, round: int, nodes: Sequence[int], size: int) -> list[int]:
    """Return the nodes of an evaluation, drawn independently of the training cohort."""
    rng = generator(seed, "evaluation cohort", round)
    chosen = rng.choice(len(nodes), min(size, len(nodes)), replace=False, shuffle=False)
    return [nodes[k] for k in sorted(chosen)]


@dataclass
class NodeBackoff:
    """Exponential backoff for nodes that do not answer within the timeout of a round.

    After its first such round a node is skipped once, then twice, four times and so on; an answer
    resets it. So one node that hangs costs the timeout in few rounds, not in all.
    """

    misses: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def record(self, round: int, answered: Iterable[int], unanswered: Iterable[int]) -> None:
        """Record which nodes answered in a round and which did not."""
        for node in answered:
            self.misses.pop(node, None)
        for node in unanswered:
            self.until[node] = round + 2 ** self.misses.get(node, 0)
            self.misses[node] = self.misses.get(node, 0) + 1

    def watch(self, round: int, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield the replies, then record which nodes answered."""
        answered, unanswered = list[int](), list[int]()
        for reply in replies:
            (unanswered if is_unanswered(reply) else answered).append(reply.metadata.src_node_id)
            yield reply
        self.record(round, answered, unanswered)

    def active(self, round: int, cohort: Collection[int], least: int) -> list[int]:
        """Return the cohort without skipped nodes; all of it where fewer than `least` remain."""
        active = [node for node in cohort if self.until.get(node, 0) < round]
        return active if len(active) >= max(1, least) else list(cohort)
