"""`Census`: who the nodes are, in a way that survives their restarts.

Node ids are random and change when a SuperNode starts again. Clients that say
`fedexp.flower.identify(app)` tell the server a name that stays, and their partition.

Which nodes take part in a round: a pure function of the seed, the round and who is there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.engine.plan import sample_cohort
from fedexp.errors import FedExPError
from fedexp.flower.client_state import PARTITION, QUERY
from fedexp.flower.gather import is_unanswered, receive
from fedexp.seeding import generator

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


LOOKS = 1.0  # seconds between two looks for nodes
TELLS = 30.0  # seconds between two lines that say so


class TooFewNodesError(FedExPError):
    """There were not enough nodes in time."""


@dataclass(frozen=True)
class Shares:
    """How many nodes take part, by FedAvg's arguments.

    Args:
        fraction: of the nodes there are.
        least: take part at least.
        available: must be there at least.
    """

    fraction: float
    least: int
    available: int

    def cohort(self, nodes: int) -> int:
        return max(int(nodes * self.fraction), self.least, 1)

    def needed(self, nodes: int) -> int:
        """How many must be there before a round begins."""
        return max(self.available, self.cohort(nodes))


def wait_for_nodes(grid: Grid, shares: Shares, patience: float) -> list[int]:
    """The nodes there are, once they are enough; raises `TooFewNodesError` after `patience`
    seconds."""
    end, told = time.monotonic() + patience, -TELLS
    while True:
        nodes = list(grid.get_node_ids())
        needed = shares.needed(len(nodes))
        if len(nodes) >= needed:
            return nodes
        now = time.monotonic()
        if now >= end:
            raise TooFewNodesError(
                f"{len(nodes)} of {needed} nodes after waiting {patience:g} s; start more "
                "SuperNodes, or lower min_available_nodes and min_train_nodes"
            )
        if now - told >= TELLS:
            log(INFO, "waiting for nodes: %d of %d are there", len(nodes), needed)
            told = now
        time.sleep(min(LOOKS, end - now))


def training_cohort(seed: int, round: int, ordered: Sequence[int], cohort: int) -> list[int]:
    """The nodes of a training round: the cohort that the simulator draws."""
    return [ordered[k] for k in sample_cohort(seed, round, len(ordered), cohort)]


def evaluation_cohort(seed: int, round: int, ordered: Sequence[int], cohort: int) -> list[int]:
    """The nodes of an evaluation; drawn apart from those of the training."""
    rng = generator(seed, "evaluation cohort", round)
    chosen = rng.choice(len(ordered), min(cohort, len(ordered)), replace=False, shuffle=False)
    return [ordered[k] for k in sorted(chosen)]


@dataclass
class Absences:
    """Nodes that let a round run into its timeout, and for how long they are passed over.

    After its first such round a node is passed over once, then twice, four times and so on; an
    answer clears it. So one node that hangs costs the timeout in few rounds, not in all.
    """

    times: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def note(self, round: int, answered: Iterable[int], silent: Iterable[int]) -> None:
        for node in answered:
            self.times.pop(node, None)
        for node in silent:
            self.until[node] = round + 2 ** self.times.get(node, 0)
            self.times[node] = self.times.get(node, 0) + 1

    def watch(self, round: int, replies: Iterable[Message]) -> Iterator[Message]:
        """The replies, noting who did not answer."""
        answered, silent = list[int](), list[int]()
        for reply in replies:
            (silent if is_unanswered(reply) else answered).append(reply.metadata.src_node_id)
            yield reply
        self.note(round, answered, silent)

    def present(self, round: int, cohort: Collection[int], least: int) -> list[int]:
        """The cohort without those who are passed over; all where too few would remain."""
        kept = [node for node in cohort if self.until.get(node, 0) < round]
        return kept if len(kept) >= max(1, least) else list(cohort)
