"""`Training`: what a server knows of its federation while it trains, and the two ends of a round.

`messages` begins a round, `complete` ends it; how the replies become sums lies between them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import Any
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedexp.aggregate import Aggregate
from fedexp.client import SGD, Prox
from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, FedExPError, require
from fedexp.flower.gather import Gathered
from fedexp.flower.layout import apparent_ties
from fedexp.flower.nodes import (
    Absences,
    Census,
    Shares,
    evaluation_cohort,
    training_cohort,
    wait_for_nodes,
)
from fedexp.flower.request import SHARED, layout_terms
from fedexp.flower.server import Server
from fedexp.flower.settings import Settings
from fedexp.privacy import Ledger, Mechanism, Release

Row = Mapping[str, Any]
FAR = 3.0  # a step size after which one of 1 shows that it was too long
GRACE = 5.0  # seconds, so that it is the server that says who was late, not the SuperLink

CAPPED = (
    "privacy divides by a fixed number of clients, so cohorts are capped at %d of %d; set "
    "CentralPrivacy(cohort=...) for larger ones"
)
NOT_DRAWN = (
    "a private round sums one reply from each client of the cohort that was drawn, and no other; "
    "let configure_train send its messages as they are, once for every aggregate_train"
)


class NoRepliesError(FedExPError):
    """Round after round, no client gave anything to train with."""


class Training:
    """A run at work.

    Args:
        settings: of the strategy.
        arrays: the first model.
        rounds: rounds in all, where they are known.
        timeout: seconds that a round may take.
    """

    def __init__(
        self,
        settings: Settings,
        arrays: ArrayRecord,
        rounds: int | None = None,
        timeout: float = 3600,
    ) -> None:
        self.settings, self.rounds, self.timeout = settings, rounds, timeout
        tied = settings.tied
        if tied is None:
            tied = apparent_ties(arrays, settings.buffers)
        self.server = Server(settings.algorithm, arrays, settings.buffers, tied)
        self.study = uuid4().hex
        self.census = Census()
        self.absences, self.evaluation_absences = Absences(), Absences()
        self.accepted: dict[str, int] = {}
        self.newly_accepted: list[str] = []
        self.ledger = Ledger()
        self.stepped = False  # whether the last round moved the model
        self._mechanism: Mechanism | None = None
        self._planned: Release | None = None  # of a cohort that was drawn and not yet released
        self._drawn: frozenset[int] = frozenset()
        self._capped = False
        self._first = self._most = self._asked = self._empty = 0
        self._last_step = 1.0
        self._said: set[str] = set()
        self._began = time.monotonic()

    def restore(self, state: SimulationState, rows: Sequence[Row]) -> None:
        """Resume from a state; the rows say who took part in the rounds before, and how clients
        reported the model to be laid out."""
        for row in rows:
            if "layout" in row:
                parts = row["layout"]
                self.server.layout = self.server.layout.with_kinds(parts["buffers"], parts["tied"])
        self.server.state = state
        seen = [int(row["nodes"]) for row in rows if row.get("nodes")]
        self._first, self._most = (seen[0], max(seen)) if seen else (0, 0)
        for row in rows:
            self.accepted |= dict.fromkeys(row.get("accepted", ()), row["round"])

    def messages(
        self, round: int, grid: Grid, shares: Shares, arrays_key: str, config: tuple[str, Row]
    ) -> list[Message]:
        """The round's messages, to its cohort."""
        self._began, self.newly_accepted = time.monotonic(), []
        nodes, cohort = self._cohort(round, grid, shares)
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(cohort), len(nodes))
        key, told = config
        common = {arrays_key: self.server.model()}
        if (broadcast := self.server.broadcast()) is not None:
            common[SHARED] = broadcast
        everyone = {**told, **self.settings.client_config(), "fedexp.study": self.study}
        if not self.open_parts:
            everyone |= layout_terms(self.server.layout)
        if self._mechanism is not None:
            everyone |= self._mechanism.config()
        self._asked, self._drawn = len(cohort), frozenset(cohort)
        self._charge(by_clients=True)
        return [
            Message(
                RecordDict({**common, key: ConfigRecord({**everyone, **self._private(node)})}),
                node,
                MessageType.TRAIN,
                ttl=self.lifetime,
            )
            for node in cohort
        ]

    def complete(self, gathered: Gathered) -> dict[str, float]:
        """Take the server's step; return the numbers of the round."""
        round = self.server.state.round + 1
        self.absences.note(round, gathered.accepted, gathered.unanswered)
        gathered = self._enough(gathered)
        aggregate = gathered.aggregate
        self._count_empty(gathered)
        self._warn_of_other_rules(gathered)
        released = self._released(round, gathered)
        used = aggregate if released is None else released
        try:
            metrics = self.server.step(used, self._total_weight(aggregate))
        except DivergedError:
            if gathered.longest is not None and self._mechanism is None:
                text = "the longest update of the round is that of node %d, with a norm of %.3g; "
                text += "max_norm leaves such replies out"
                log(WARNING, text, *gathered.longest)
            raise
        self.stepped = bool(used.count > 0)
        self._warn_of_overshoot(metrics)
        clients = [self.census.client(node) for node in gathered.accepted]
        self.newly_accepted = sorted(c for c in clients if c) if self.settings.keeps_state else []
        self.accepted |= dict.fromkeys(self.newly_accepted, round)
        metrics |= gathered.metrics
        if self._mechanism is not None:
            metrics |= self._mechanism.metrics(self.ledger.releases, released)
        return metrics | {
            "clients": float(len(gathered.accepted)),
            "dropped": float(gathered.dropped),
            "unanswered": float(len(gathered.unanswered)),
            "nodes": float(self._most),
            "seconds": time.monotonic() - self._began,
        }

    @property
    def open_parts(self) -> frozenset[str]:
        """What clients may still report of the model's layout: nothing after the first step, nor
        where noise or masks rely on it."""
        given = self.settings
        private = given.privacy is not None or given.secure is not None
        if given.tied is not None or private or self.server.state.steps:
            return frozenset()
        return frozenset({"tied"} if given.buffers is not None else {"buffers", "tied"})

    @property
    def lifetime(self) -> float:
        """Seconds after which nodes need not begin with a message: nobody waits for it then."""
        return self.timeout + GRACE

    def evaluators(self, round: int, seed: int, nodes: Sequence[int], wanted: int) -> list[int]:
        """The nodes of an evaluation, without those that have let this server wait."""
        cohort = evaluation_cohort(seed, round, self.census.ordered(nodes), wanted)
        for absences in (self.absences, self.evaluation_absences):
            cohort = absences.present(round, cohort, least=1)
        return cohort

    @property
    def hides_client_metrics(self) -> bool:
        """Whether what clients tell beside their updates may not be told on."""
        return self._mechanism is not None and self._mechanism.hides_client_metrics

    def clipped(self) -> Any:
        """The clip of a private mechanism, or None."""
        return None if self._mechanism is None else self._mechanism.clipped

    def _cohort(self, round: int, grid: Grid, shares: Shares) -> tuple[list[int], list[int]]:
        wait = self.settings.wait_for_nodes
        nodes = wait_for_nodes(grid, shares, self.timeout if wait is None else wait)
        size = shares.cohort(len(nodes))
        if self._asks():
            self.census.ask(grid, nodes, self.timeout)
        elif size < len(nodes):
            text = "cohorts follow node ids, which are new in every federation; for cohorts that "
            text += "follow the seed, add identify(app) to the ClientApp and identify=True here"
            self._say(INFO, text)
        clients = self.census.clients(nodes)
        self._first, self._most = self._first or clients, max(self._most, clients)
        self._prepare(shares)
        ordered = self.census.ordered(nodes)
        if self._mechanism is not None:
            return nodes, self._private_cohort(self._mechanism, round, ordered, shares)
        chosen = training_cohort(self.settings.seed, round, ordered, size)
        secure = self.settings.secure
        least = shares.least if secure is None else max(shares.least, secure.fewest)
        return nodes, self.absences.present(round, chosen, least)

    def _private_cohort(
        self, mechanism: Mechanism, round: int, ordered: Sequence[int], shares: Shares
    ) -> list[int]:
        """Draw the cohort of a private round: as it is charged, and no client twice.

        Raises `BudgetSpentError` before anybody is asked where the round would cost too much.
        """
        once = list({self.census.client(node) or node: node for node in ordered}.values())
        wanted = shares.cohort(len(once))
        plan = self._planned = mechanism.plan(len(once), wanted)
        if plan.cohort < min(wanted, len(once)) and not self._capped and plan.sampling != "poisson":
            self._capped = True
            log(WARNING, CAPPED, plan.cohort, wanted)
        if mechanism.limit is not None:
            self.ledger.require_room(plan, mechanism.limit, mechanism.delta)
        secret = mechanism.sample(len(once), plan, round)
        if secret is not None:
            return [once[k] for k in secret]
        chosen = training_cohort(self.settings.seed, round, once, plan.cohort)
        return self.absences.present(round, chosen, shares.least)

    def _prepare(self, shares: Shares) -> None:
        """Fix noise and divisor by the federation there was at the start."""
        settings, clients = self.settings, self.settings.total_clients or self._first
        if settings.secure is not None:
            size = shares.cohort(self._most)
            settings.secure.check(
                settings.algorithm.client, self.server.layout, settings.weighting, size
            )
        if settings.privacy is None or self._mechanism is not None:
            return
        require(self.rounds is not None, "privacy needs the number of rounds; call start")
        self._mechanism = settings.privacy.prepare(
            clients=clients,
            cohort=shares.cohort(clients),
            rounds=self.rounds or 0,
            algorithm=settings.algorithm,
            weighting=settings.weighting,
            buffers=bool(self.server.layout.averaged),
        )

    def _private(self, node: int) -> dict[str, int]:
        """What only this client is told: the last round in which its reply was used."""
        client = self.census.client(node)
        if client is None or not self.settings.keeps_state:
            return {}
        return {"fedexp.accepted": self.accepted.get(client, 0)}

    def _released(self, round: int, gathered: Gathered) -> Aggregate | None:
        """Noise the sums of a cohort that was drawn, also where nobody is in it or answered: a
        model that stays as it is would show that. Sums that nobody has planned are refused."""
        privacy, plan, heard = self.settings.privacy, self._planned, gathered.accepted
        if privacy is None:
            return None
        known = len(set(heard)) == len(heard) and self._drawn.issuperset(heard)
        require(known, NOT_DRAWN)
        if self._mechanism is None or plan is None:
            return None
        self._charge(by_clients=False)
        self._planned, self._drawn = None, frozenset()
        if privacy.noised_by_clients and not heard:
            return None  # nobody sent any noise, and nobody's update was seen
        return self._mechanism.release(gathered.aggregate, round)

    def _charge(self, by_clients: bool) -> None:
        """Charge the round at the moment from which on it can be seen."""
        privacy = self.settings.privacy
        if privacy is None or self._planned is None or privacy.noised_by_clients != by_clients:
            return
        self.ledger.charge(self._planned)

    def _total_weight(self, aggregate: Aggregate) -> float:
        """Of all clients there are; those not in the round are taken to weigh as these do."""
        each = float(aggregate.weight / aggregate.count) if aggregate.count > 0 else 1.0
        return (self.settings.total_clients or self._most) * each

    def _count_empty(self, gathered: Gathered) -> None:
        self._empty = 0 if gathered.accepted or not self._asked else self._empty + 1
        if self._empty >= self.settings.max_empty_rounds:
            raise NoRepliesError(
                f"no usable reply in {self._empty} rounds in a row; the lines above say why for "
                "each node; fix the ClientApp or raise the timeout"
            )

    def _asks(self) -> bool:
        if self.settings.identify is not None:
            return self.settings.identify
        return self.settings.keeps_state or self.settings.privacy is not None

    def _enough(self, gathered: Gathered) -> Gathered:
        """Return what a round brought, or nothing where too few replies are usable."""
        found, least = len(gathered.accepted), self.settings.min_replies
        if not 0 < found < least:
            return gathered
        log(WARNING, "%d usable replies of %d needed: the model stays as it is", found, least)
        return Gathered(
            Aggregate.zero(self.server.layout.dim, self.server.state.params.dtype),
            dropped=gathered.dropped + found,
            unanswered=gathered.unanswered,
            client_metrics=gathered.client_metrics,
        )

    def _warn_of_other_rules(self, gathered: Gathered) -> None:
        """FedProx changes what clients do; a ClientApp that ignores it trains as in FedAvg."""
        settings = self.settings
        hidden = settings.privacy is not None and settings.privacy.noised_by_clients
        plain = settings.algorithm.client in (SGD(), Prox(0.0))
        if plain or hidden or settings.secure is not None:
            return
        asked = settings.client_config()["fedexp.client"]
        others = [node for node, rule in gathered.rules.items() if rule != asked]
        if others:
            text = "%d of %d replies do not confirm the client rule %r (e.g. that of node %d): a "
            text += "ClientApp that ignores it trains as in FedAvg; use fedexp.flower.LocalRule, "
            text += "or add the proximal term yourself with the proximal-mu of the config"
            self._say(WARNING, text, len(others), len(gathered.rules), asked, others[0])

    def _warn_of_overshoot(self, metrics: Mapping[str, float]) -> None:
        """Log it where a long step is followed by one of 1: after a step that went too far, all
        clients pull in one direction."""
        step = metrics.get("server_lr", self._last_step)
        if metrics.get("clamped") == 1.0 and self._last_step >= FAR:
            text = "the step size fell from %.3g to %.3g: the last step may have gone too far. If "
            text += "the evaluation got worse, set max_step=2 or raise eps, or lower the learning "
            text += "rate or momentum of the clients (docs/flower.md, Retuning)"
            self._say(WARNING, text, self._last_step, step)
        self._last_step = step

    def _say(self, level: int, text: str, *args: Any) -> None:
        """Log a line once in a run."""
        if text not in self._said:
            self._said.add(text)
            log(level, text, *args)
