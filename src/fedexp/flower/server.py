"""The server side of a run: the model, the state of its rules, and who takes part.

`Server` is the algorithm alone, independent of how its sums arrive. `FederatedRun` is the server
of a strategy during one run, with the two halves of a round: `configure_round` samples a cohort and
builds its messages; `complete_round` takes the server step with the sums of the replies. How
replies become sums is up to the caller (`fedexp.flower.replies`, or `fedexp.flower.secure.round`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.algorithms import Algorithm
from fedexp.client import SGD, Prox
from fedexp.clipping import at_median
from fedexp.engine import SimulationState
from fedexp.engine.contract import probe
from fedexp.engine.state import check_range, server_step
from fedexp.errors import DivergedError, FedExPError, UsageError, require
from fedexp.flower.layout import Arrays, Layout, apparent_ties, ndarrays, to_record
from fedexp.flower.nodes import (
    CohortSize,
    NodeBackoff,
    NodeRegistry,
    evaluation_cohort,
    training_cohort,
    wait_for_nodes,
)
from fedexp.flower.replies import AggregatedReplies, Suspect
from fedexp.flower.request import BROADCAST, layout_config
from fedexp.objective import buffer_changes
from fedexp.privacy import Ledger, Mechanism, Release
from fedexp.privacy.settings import DROWNED
from fedexp.runs.journal import is_finite
from fedexp.server.extrapolation import ExP, diversity

if TYPE_CHECKING:
    from fedexp.flower.strategy import Settings

Row = Mapping[str, Any]
DOMINANT = 0.9  # share of a sum from which on one node decides it
LONG_STEP = 3.0  # a step size after which one of 1 shows that it was too long
GRACE = 5.0  # seconds that messages outlive a round, so that the server reports late nodes

CAPPED = (
    "privacy divides by a fixed number of clients, so cohorts are capped at %d of %d; set "
    "CentralPrivacy(cohort=...) for larger ones"
)
SMALL_COHORT = (
    "with %d clients per round the step exceeds %g only where their updates point against each "
    "other, so FedExP differs little from FedAvg; let more clients take part"
)
NOT_DRAWN = (
    "a private round sums one reply from each client of the cohort that was drawn, and no others; "
    "send the messages of configure_train unchanged, once for every aggregate_train"
)
GUESSED = (
    "{!r} and {!r} are equal in the initial model; privacy and secure need to know before the "
    "first round whether they are tied, or copies that are trained separately: give model= or "
    "tied= (tied={{}} for copies)"
)


class Server:
    """The model and the server state of an algorithm between rounds.

    Args:
        algorithm: e.g. `fedexp.fedexp(eps=1e-3)`.
        arrays: the initial model.
        buffers: names of the arrays that are averaged; see `Layout.of`.
        tied: further names of parameters; see `Layout.of`.

    Attributes:
        layout: the conversion between the model's arrays and vectors.
        state: all that is needed to resume; client states are stored by the clients.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        arrays: ArrayRecord,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.layout = Layout.of(arrays, buffers, tied)
        self.state = self._initial_state(arrays)
        for name, value in ndarrays(arrays).items():
            require(
                bool(np.isfinite(value).all()),
                f"the initial model has values that are not finite ({name!r}); start from a finite "
                "one; register a mask with persistent=False, so that it stays out of the "
                "state_dict",
            )

    def lay_out(self, layout: Layout) -> None:
        """Change which arrays of the initial model are buffers or tied."""
        require(self.state.steps == 0, "the layout of a model is fixed at the first step")
        arrays, round = self.model(), self.state.round
        self.layout = layout
        self.state = replace(self._initial_state(arrays), round=round)

    def adopt(self, arrays: ArrayRecord, round: int) -> None:
        """Replace the model after a round by these arrays.

        Clients train from them next, and they are evaluated; the state of the rule is unchanged.
        """
        reason = self.layout.misfit(ndarrays(arrays))
        require(
            reason is None,
            f"aggregate_train returned arrays that are not the model's: {reason}; return arrays of "
            "the same names and shapes",
        )
        params, buffers = self.layout.flat(arrays), self.layout.buffers(arrays)
        after = replace(
            self.state,
            round=round,
            steps=max(1, self.state.steps),
            params=params,
            buffers=buffers,
            recent=((params, buffers),),
        )
        self._check(after)
        self.state = after

    def model(self) -> ArrayRecord:
        """Return the last iterate, from which clients train."""
        return self.layout.arrays(self.state.params, self.state.buffers)

    def output(self) -> ArrayRecord:
        """Return the mean of the last iterates, which is evaluated and returned (Section 5)."""
        return self.layout.arrays(*self.state.output())

    def broadcast(self) -> ArrayRecord | None:
        """Return the broadcast state of the client rule (SCAFFOLD's c); None if it has none."""
        return to_record(self.state.broadcast) if self.state.broadcast else None

    def start_point(self) -> Tensor:
        """Return the parameters as clients received them, rounded to the types of the arrays."""
        return self.layout.rounded(self.state.params)

    def contribution(self, arrays: Arrays, start: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a client's update Δ_i = w - w_i, and the change of its buffers as an extra."""
        before, after = self.state.buffers.averaged, self.layout.buffers(arrays).averaged
        extras = {"buffers": buffer_changes(after, before)} if after.numel() else {}
        return start - self.layout.flat(arrays), extras

    def step(self, aggregate: Aggregate, total_weight: float) -> dict[str, float]:
        """Take the server step of a round; return its metrics.

        A round without clients does not change the model. One that diverges raises
        `DivergedError` and leaves the state of the round before.

        Args:
            aggregate: the sums of the round.
            total_weight: of all clients, in this round or not.
        """
        after = replace(self.state, round=self.state.round + 1)
        metrics = {"clients": float(aggregate.count), "dropped": float(aggregate.dropped)}
        if aggregate.count > 0:
            after, of_rule = server_step(self.algorithm, after, aggregate, total_weight)
            self._check(after)
            mean_sq_norm, sq_norm_of_mean = aggregate.mean_sq_norm, aggregate.sq_norm_of_mean
            norms = {  # determine FedExP's step; reported for the other rules too
                "diversity": float(diversity(mean_sq_norm, sq_norm_of_mean)),
                "mean_sq_norm": float(mean_sq_norm),
                "sq_norm_of_mean": float(sq_norm_of_mean),
            }
            metrics = norms | of_rule | metrics
        self.state = after
        return metrics

    def _initial_state(self, arrays: ArrayRecord) -> SimulationState:
        params, buffers = self.layout.flat(arrays), self.layout.buffers(arrays)
        state = SimulationState.of(params, buffers, self.algorithm)
        probe(self.algorithm, state)
        return state

    def _check(self, after: SimulationState) -> None:
        check_range(after)
        if not self.layout.rounded(after.params).isfinite().all():
            raise DivergedError(after.round, "the model no longer fits the type of its arrays")
        arrays = self.layout.arrays(after.params, after.buffers)  # in their types
        if not (is_finite(after) and self.layout.buffers(arrays).averaged.isfinite().all()):
            raise DivergedError(after.round, "a buffer or the state of a rule is not finite")


class NoRepliesError(FedExPError):
    """Several rounds in a row had no usable reply."""


class FederatedRun(Server):
    """The server during one run of a strategy, with its nodes, its clients and its privacy.

    Args:
        settings: of the strategy.
        arrays: the initial model.
        rounds: rounds in total, where known.
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
            if tied and settings.fixes_layout:
                raise UsageError(GUESSED.format(*next(iter(tied.items()))))
        super().__init__(settings.algorithm, arrays, settings.buffers, tied)
        self.study = uuid4().hex
        self.nodes = NodeRegistry()
        self.train_backoff, self.evaluate_backoff = NodeBackoff(), NodeBackoff()
        self.suspects = NodeBackoff()  # nodes with the largest share of a step that was undone
        self.accepted: dict[str, int] = {}  # by client, the last round whose reply was used
        self.newly_accepted: list[str] = []
        self.setbacks = Counter[str]()  # in a row: rounds, undone evaluations, fallbacks
        self.earlier: tuple[SimulationState, ...] = ()  # to fall back to, the last one first
        self.notes: dict[str, Any] = {}  # further entries of the row of this round
        self.ledger = Ledger()
        self.stepped = False  # whether the last round changed the model
        self.undone: DivergedError | None = None  # why the last step that was undone diverged
        self.expected: ArrayRecord | None = None  # the arrays that configure_train is called with
        self.mechanism: Mechanism | None = None  # of privacy in this round, from the first one on
        self._prepared: Mechanism | None = None  # with the clip of the first round
        self.drawn: frozenset[int] = frozenset()  # nodes of the cohort that are sent messages
        self._planned: Release | None = None  # of a cohort that was drawn and not yet released
        self._first_clients = self._most_clients = 0
        self._last_step = 1.0
        self._trusted = self.state  # after an evaluation
        self._suspects: dict[int, Suspect] = {}  # by round
        self._hides_updates = settings.privacy is not None or settings.secure is not None
        self._logged: set[str] = set()
        self._round_start = time.monotonic()

    def restore(self, state: SimulationState, rows: Sequence[Row]) -> None:
        """Resume from a state; all else comes from the rows of earlier rounds."""
        self.state = self._trusted = self._with_medians(state)
        clients = [int(row["nodes"]) for row in rows if row.get("nodes")]
        self._first_clients, self._most_clients = (clients[0], max(clients)) if clients else (0, 0)
        for row in rows:
            if "layout" in row:
                layout = row["layout"]
                self.layout = self.layout.with_kinds(layout["buffers"], layout["tied"])
            if "largest_share" in row and row.get("clients"):  # else the step was undone
                share, node, name = row["largest_share"]
                self._suspects[row["round"]] = Suspect(float(share), int(node), str(name))
            if "back_to" in row:
                self._forget(int(row["back_to"]))
            self.suspects.record(row["round"], (), map(int, row.get("undone", ())))
            self.accepted |= dict.fromkeys(row.get("accepted", ()), row["round"])
            self.setbacks = Counter({n: int(count) for n, count in row.get("setbacks", {}).items()})

    def _with_medians(self, state: SimulationState) -> SimulationState:
        """Return a state with the medians of today's bound, which may have been set or left out."""
        initial = SimulationState.of(state.params, state.buffers, self.algorithm).server
        server = {name: state.server.get(name, value) for name, value in initial.items()}
        return replace(state, server=server)

    def configure_round(
        self, round: int, grid: Grid, size: CohortSize, arrays_key: str, config: tuple[str, Row]
    ) -> list[Message]:
        """Return the train messages of a round, one per node of its cohort.

        Args:
            round: counted from 1.
            grid: of the ServerApp.
            size: of the cohort.
            arrays_key: of the model in the messages.
            config: the key and the content of the config record.
        """
        self._round_start, self.newly_accepted = time.monotonic(), []
        nodes, cohort = self._cohort(round, grid, size)
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(cohort), len(nodes))
        config_key, user_config = config
        records: dict[str, Any] = {arrays_key: self.model()}
        if (broadcast := self.broadcast()) is not None:
            records[BROADCAST] = broadcast
        common = {**user_config, **self.settings.client_config(), "fedexp.api": self.study}
        if not self.undecided_layout:
            common |= layout_config(self.layout)
        if self.mechanism is not None:
            common |= self.mechanism.config()
        self.drawn = frozenset(cohort)
        if self._planned is not None and self.settings.noised_by_clients:
            self.ledger.charge(self._planned)  # clients release from here on

        def message(node: int) -> Message:
            content = {**records, config_key: ConfigRecord({**common, **self._node_config(node)})}
            return Message(RecordDict(content), node, MessageType.TRAIN, ttl=self.message_ttl)

        return [message(node) for node in cohort]

    def complete_round(self, replies: AggregatedReplies) -> dict[str, float]:
        """Take the server step; return the metrics of the round."""
        round = self.state.round + 1
        self.train_backoff.record(round, replies.accepted, replies.unanswered)
        replies = self._require_min_replies(replies)
        if replies.suspect is not None and not self._hides_updates:
            self._suspects[round] = replies.suspect
            self.notes["largest_share"] = list(replies.suspect)
        if self.drawn and not replies.accepted:
            self._count_empty(replies.diverged)
        self._warn_of_other_rules(replies)
        released = self._release(round, replies)
        aggregate = replies.aggregate if released is None else released
        before = self.state
        try:
            metrics = self.step(aggregate, self._total_weight(replies.aggregate))
            self.stepped = bool(aggregate.count > 0)
            if replies.accepted:
                self.setbacks["empty"] = 0
                self._hold(before)
        except DivergedError as error:
            self._leave_out(error, self._trusted.round)
            self._suspects.pop(round, None)
            replies = self._without_updates(replies)
            self._count_empty(error=error)
            metrics = self.step(replies.aggregate, 1.0)
            self.stepped = False
        if metrics.get("clipped") and replies.longest is not None:
            text = "%d of %d clients are clipped; median norm %.3g, longest %.3g (node %d)"
            node, longest = replies.longest
            numbers = int(metrics["clipped"]), len(replies.accepted), metrics["median_norm"]
            log(INFO, text, *numbers, longest, node)
        self._warn_of_overshoot(metrics)
        if self.settings.stateful_clients:
            clients = [self.nodes.client(node) for node in replies.accepted]
            self.newly_accepted = sorted(client for client in clients if client)
            self.accepted |= dict.fromkeys(self.newly_accepted, round)
        metrics |= replies.metrics
        if self.mechanism is not None:
            metrics |= self.mechanism.metrics(self.ledger.releases, released)
            if metrics.get("noise_share") == 1.0 and replies.accepted:
                self.log_once(WARNING, DROWNED)
        return metrics | {
            "clients": float(len(replies.accepted)),
            "dropped": float(replies.dropped),
            "unanswered": float(len(replies.unanswered)),
            "nodes": float(self._most_clients),
            "seconds": time.monotonic() - self._round_start,
        }

    def trust(self) -> None:
        """Keep the model, whose evaluation was finite, for steps that have to be undone."""
        self._trusted, self.setbacks["evaluations"] = self.state, 0

    def undo_steps(self, error: DivergedError) -> None:
        """Return to the last model that was evaluated as finite; leave a suspect out.

        Raises the error where it is the last of `max_empty_rounds` in a row.
        """
        self.setbacks["evaluations"] += 1
        if self.setbacks["evaluations"] >= self.settings.max_empty_rounds:
            raise error
        self._leave_out(error, self._trusted.round)
        self._return_to(self._trusted)
        self.earlier = tuple(s for s in self.earlier if s.steps < self.state.steps)

    def _hold(self, state: SimulationState) -> None:
        """Hold the state before a step, to fall back to it.

        At most three are held: the last one, the last after a multiple of 4 steps, and the last
        after a multiple of 16, so that the oldest is from 5 to 16 steps ago. After a fallback none
        is, until clients can train from a state with as many steps as the one that was left.
        """
        if self._hides_updates or any(state.steps < s.steps for s in self.earlier):
            return
        held = {(s.steps % 4 == 0) + (s.steps % 16 == 0): s for s in (*self.earlier, state)}
        self.earlier = tuple(sorted(held.values(), key=lambda s: s.steps))
        self.setbacks["fallbacks"] = 0

    def _fall_back(self) -> bool:
        """Return to an earlier state, as clients cannot train from this one; False without one.

        That is the state before the step that one node decided, and what followed that step is
        discarded. Without such a step it is the state before the last one, the next time an older
        one; at last the newest is tried again, so that nothing is undone where the cause was not
        the state.
        """
        earlier, count = self.earlier, self.setbacks["fallbacks"]
        if not earlier or count > len(earlier):
            return False
        oldest, suspects = min(state.round for state in earlier), self._suspects.items()
        decided = [(s.share, r) for r, s in suspects if r > oldest and s.share >= DOMINANT]
        _, since = max(decided, default=(0.0, self.state.round + 1))
        at = max(k for k, state in enumerate(earlier) if state.round < since)
        state, self.earlier = earlier[at], (self.state, *earlier[at + 1 :], *earlier[:at])
        if decided:
            self.earlier = tuple(s for s in earlier if s.steps < state.steps)
        what = f"no usable reply, most not finite or too long: back to round {state.round}"
        error, steps = DivergedError(self.state.round + 1, what), self.state.steps - state.steps
        self._leave_out(error, state.round, max(1, steps), DOMINANT)
        self._return_to(state)
        self.setbacks = Counter(fallbacks=count + 1)
        return True

    def _return_to(self, state: SimulationState) -> None:
        """Continue from an earlier state; control variates begin again, as clients store two."""
        self._forget(state.round)
        self.notes["back_to"] = state.round
        broadcast = self.algorithm.client.init_broadcast(state.params)
        self.state = replace(self._with_medians(state), round=self.state.round, broadcast=broadcast)
        self._trusted, self.stepped, self.newly_accepted = self.state, False, []

    def _forget(self, round: int) -> None:
        """Forget whose replies were used, and the suspects of the steps after a round."""
        self.accepted = {}
        self._suspects = {r: suspect for r, suspect in self._suspects.items() if r <= round}

    def _leave_out(
        self, error: DivergedError, since: int, steps: int = 1, least: float = 0.0
    ) -> None:
        """Leave the node that has added most to a step since a round out of some rounds.

        None is left out where the largest share is below `least`. Raises the error where the
        server does not see updates.
        """
        self.undone, text = error, "round %d diverged (%s) and is undone; set bound or max_norm"
        if self._hides_updates:
            raise error
        suspects = [s for r, s in self._suspects.items() if r > since and s.share >= least]
        if not suspects:
            log(WARNING, text, error.round, error.what)
            return
        share, node, name = max(suspects)
        text += "; node %d, with the largest share of the %s sums (%.0f%%), is left out for a while"
        log(WARNING, text, error.round, error.what, node, name, 100 * share)
        self.notes["undone"] = [node] * (2 * steps - 1).bit_length()  # each doubles the rounds
        self.suspects.record(error.round, (), self.notes["undone"])

    @property
    def undecided_layout(self) -> frozenset[str]:
        """Return the parts of the model's layout that replies may still decide.

        None after the first step, nor where noise or masks depend on the layout.
        """
        settings = self.settings
        if settings.tied is not None or settings.fixes_layout or self.state.steps:
            return frozenset()
        return frozenset({"tied"} if settings.buffers is not None else {"buffers", "tied"})

    @property
    def message_ttl(self) -> float:
        """Return the seconds after which a node need not process a message any more."""
        return self.timeout + GRACE

    def available_nodes(self, grid: Grid) -> list[int]:
        """Return the nodes that are online and may take part; query new ones for their names."""
        nodes = list(grid.get_node_ids())
        if not self.settings.queries_client_ids:
            return nodes
        return self.nodes.query(grid, nodes, self.timeout)

    def evaluation_nodes(self, round: int, nodes: Sequence[int], size: int) -> list[int]:
        """Return the nodes of an evaluation, without those that recently did not answer."""
        cohort = evaluation_cohort(self.settings.seed, round, self.nodes.sort(nodes), size)
        for backoff in (self.train_backoff, self.evaluate_backoff):
            cohort = backoff.active(round, cohort, least=1)
        return cohort

    def _cohort(self, round: int, grid: Grid, size: CohortSize) -> tuple[list[int], list[int]]:
        """Return the available nodes and the cohort of a round."""
        wait = self.settings.wait_for_nodes
        available = partial(self.available_nodes, grid)
        nodes = wait_for_nodes(available, size, self.timeout if wait is None else wait)
        if not self.settings.queries_client_ids and size.of(len(nodes)) < len(nodes):
            text = "cohorts follow node ids, which are new in every federation; for cohorts that "
            text += "follow the seed, add report_client_id(app) to the ClientApp and "
            text += "query_client_ids=True here"
            self.log_once(INFO, text)
        self._first_clients = self._first_clients or len(nodes)
        self._most_clients = max(self._most_clients, len(nodes))
        self._prepare(size)
        self._warn_of_client_state(nodes)
        rule, cohort_size = self.settings.algorithm.server, size.of(len(nodes))
        if isinstance(rule, ExP) and cohort_size < 2 * rule.factor:
            self.log_once(INFO, SMALL_COHORT, cohort_size, max(1.0, cohort_size / rule.factor))
        ordered = self.nodes.sort(nodes)
        if self.mechanism is not None:
            return nodes, self._private_cohort(self.mechanism, round, ordered, size)
        cohort = training_cohort(self.settings.seed, round, ordered, cohort_size)
        secure = self.settings.secure
        least = size.least if secure is None else max(size.least, secure.fewest)
        cohort = self.train_backoff.active(round, cohort, least)
        return nodes, self.suspects.active(round, cohort, 1)

    def _private_cohort(
        self, mechanism: Mechanism, round: int, ordered: Sequence[int], size: CohortSize
    ) -> list[int]:
        """Draw the cohort of a private round as it is charged.

        Raises `BudgetSpentError` before any message is sent where the round would cost too much.
        """
        wanted = size.of(len(ordered))
        plan = self._planned = mechanism.plan(len(ordered), wanted)
        if plan.cohort < min(wanted, len(ordered)) and plan.sampling != "poisson":
            self.log_once(WARNING, CAPPED, plan.cohort, wanted)
        if mechanism.limit is not None:
            self.ledger.require_room(plan, mechanism.limit, mechanism.delta)
        secret = mechanism.sample(len(ordered), plan, round)
        if secret is not None:
            return [ordered[k] for k in secret]
        cohort = training_cohort(self.settings.seed, round, ordered, plan.cohort)
        return self.train_backoff.active(round, cohort, size.least)

    def _prepare(self, size: CohortSize) -> None:
        """Check secure aggregation; fix noise and divisor by the nodes of the first round.

        The clip follows the medians where there is a bound.
        """
        settings, clients = self.settings, self.settings.total_clients or self._first_clients
        if settings.secure is not None:
            cohort = size.of(self._most_clients)
            settings.secure.payload(settings.algorithm.client, self.layout, cohort)
        if settings.privacy is None:
            return
        if self.rounds is None:
            raise UsageError("privacy needs the number of rounds; call start")
        self._prepared = self._prepared or settings.privacy.prepare(
            clients=clients,
            cohort=size.of(clients),
            rounds=self.rounds,
            algorithm=settings.algorithm,
            weighting=settings.weights,
            buffers=bool(self.layout.averaged),
        )
        self.mechanism = at_median(self._prepared, self.algorithm.limits(self.state.server))

    def _node_config(self, node: int) -> dict[str, int]:
        """Return the config of one client only: the last round in which its reply was used."""
        client = self.nodes.client(node)
        if client is None or not self.settings.stateful_clients:
            return {}
        return {"fedexp.accepted": self.accepted.get(client, 0)}

    def _release(self, round: int, replies: AggregatedReplies) -> Aggregate | None:
        """Return the noised sums of a private round; None where there is nothing to noise.

        A cohort that was drawn is released also where it is empty or nobody answered: a model that
        does not change would reveal that. Sums of a cohort that was not drawn are refused.
        """
        plan, accepted = self._planned, replies.accepted
        if self.settings.privacy is None:
            return None
        was_drawn = len(set(accepted)) == len(accepted) and self.drawn.issuperset(accepted)
        require(was_drawn, NOT_DRAWN)
        if self.mechanism is None or plan is None:
            return None
        if not self.settings.noised_by_clients:
            self.ledger.charge(plan)  # the server releases below
        self._planned, self.drawn = None, frozenset()
        if self.settings.noised_by_clients and not accepted:
            return None  # no client sent noise, and no update was seen
        return self.mechanism.release(replies.aggregate, round)

    def _total_weight(self, aggregate: Aggregate) -> float:
        """Return the weight of all clients; absent ones are taken to weigh as the present do."""
        weight = float(aggregate.weight / aggregate.count) if aggregate.count > 0 else 1.0
        return max(self.settings.total_clients or 0, self._most_clients) * weight

    def _require_min_replies(self, replies: AggregatedReplies) -> AggregatedReplies:
        """Return the replies, or an empty round where fewer than `min_replies` are usable."""
        usable, least = len(replies.accepted), self.settings.min_replies
        if not 0 < usable < least:
            return replies
        log(WARNING, "%d usable replies of %d needed: the model is unchanged", usable, least)
        return self._without_updates(replies)

    def _without_updates(self, replies: AggregatedReplies) -> AggregatedReplies:
        """Return an empty round, whose replies count as dropped."""
        empty = Aggregate.zero(self.layout.dim, self.state.params.dtype)
        dropped = replies.dropped + len(replies.accepted)
        return AggregatedReplies(empty, dropped=dropped, unanswered=replies.unanswered)

    def _count_empty(self, diverged: int = 0, error: FedExPError | None = None) -> None:
        """Count a round without a usable reply or a step; fall back or end after too many in a row.

        It falls back where in each of them most of the cohort replied with values that are not
        finite or too long: neither errors nor a minority undo a step.
        """
        counts, most = self.setbacks, self.settings.max_empty_rounds
        counts["empty"] += 1
        counts["diverged"] = counts["diverged"] + 1 if 2 * diverged > len(self.drawn) else 0
        if counts["empty"] >= most and not (counts["diverged"] >= most and self._fall_back()):
            raise error or NoRepliesError(
                f"no usable reply in {counts['empty']} rounds in a row; the log above has the "
                "reason for each node; fix the ClientApp or raise the timeout"
            )

    def _warn_of_other_rules(self, replies: AggregatedReplies) -> None:
        """Warn where clients ignore the client rule, e.g. FedProx, and so train as in FedAvg."""
        settings = self.settings
        is_plain = settings.algorithm.client in (SGD(), Prox(0.0))
        if is_plain or settings.noised_by_clients or settings.secure is not None:
            return
        rule = settings.client_config()["fedexp.client"]
        ignoring = [node for node, name in replies.rules.items() if name != rule]
        if ignoring:
            text = "%d of %d replies do not confirm the client rule %r (e.g. that of node %d): a "
            text += "ClientApp that ignores it trains as in FedAvg; use fedexp.flower.LocalRule, "
            text += "or add the proximal term yourself with the proximal-mu of the config"
            self.log_once(WARNING, text, len(ignoring), len(replies.rules), rule, ignoring[0])

    def _warn_of_client_state(self, nodes: Sequence[int]) -> None:
        """Warn where the server's control variate will not be the mean of the clients'."""
        if not self.settings.stateful_clients:
            return
        nameless = [node for node in nodes if self.nodes.client(node) is None]
        if nameless:
            text = "%d of %d nodes report no client id (e.g. node %d): where a reply is lost, "
            text += "their client state and the server's drift apart; add report_client_id(app) to "
            text += "the ClientApp"
            self.log_once(WARNING, text, len(nameless), len(nodes), nameless[0])
        total, most = self.settings.total_clients, self._most_clients
        if total is not None and total < most:
            text = "total_clients=%d, but there are %d clients, and %d are assumed; correct it, or "
            self.log_once(WARNING, text + "leave it out", total, most, most)

    def _warn_of_overshoot(self, metrics: Mapping[str, float]) -> None:
        """Warn where a long step is followed by one of 1: after a step that went too far, all
        updates point in one direction."""
        step = metrics.get("server_lr", self._last_step)
        if metrics.get("clamped") == 1.0 and self._last_step >= LONG_STEP:
            text = "the step size fell from %.3g to %.3g: the last step may have gone too far. If "
            text += "the evaluation got worse, set max_step=2 or raise eps, or lower the learning "
            text += "rate or momentum of the clients (docs/flower.md, Retuning)"
            self.log_once(WARNING, text, self._last_step, step)
        self._last_step = step

    def log_once(self, level: int, text: str, *args: Any) -> None:
        """Log a line the first time that its text, without the arguments, is given."""
        if text not in self._logged:
            self._logged.add(text)
            log(level, text, *args)
