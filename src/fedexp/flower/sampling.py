"""Which nodes take part in a round: a pure function of the seed, the round and who is there."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.engine.plan import sample_cohort
from fedexp.errors import FedExPError
from fedexp.flower.stream import is_unanswered
from fedexp.seeding import generator

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
