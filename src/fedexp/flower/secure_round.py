"""A grid for the four stages of SecAgg+: sound replies only, in time, and summed as they arrive.

Flower's SecAgg+ over the messages of a strategy, for one round.

`secure_gather`: what `gather` does, where the server may see nothing but the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from time import monotonic
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.engine.loop import SUMMED_BYTES
from fedexp.flower.gather import Gathered, is_unanswered, receive
from fedexp.flower.replies import UnusableReply, content_of
from fedexp.flower.secure_legacy import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
    FitIns,
    Key,
    LegacyContext,
    LegacyFedAvg,
    Parameters,
    SecAggPlusWorkflow,
    SimpleClientManager,
    Stage,
    WorkflowKey,
    WorkflowState,
    bytes_to_ndarray,
    ndarray_to_bytes,
    parameters_to_ndarrays,
)
from fedexp.flower.secure_payload import (
    MODULUS,
    TERMS,
    Payload,
    SecureAggregation,
    Sums,
    Vector,
    terms_of,
)
from fedexp.flower.server import Server
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


class Unmasked(NamedTuple):
    """The mean of the vectors of a round, and whose they were."""

    mean: Vector
    nodes: list[int]


class SecureRound(SecAggPlusWorkflow):
    """One round of SecAgg+.

    Flower's workflow asks for the keys of clients that were lost before they shared any, which
    nobody has, and then fails for all. Here such clients are forgotten: no mask of theirs is in
    the sum.

    Args:
        secure: shares and threshold.
        payload: what clients pack.
        terms: what tells clients how.
        messages: the train message of each node.
    """

    def __init__(
        self,
        secure: SecureAggregation,
        payload: Payload,
        terms: ConfigRecord,
        messages: Mapping[int, Message],
    ) -> None:
        shares = secure.shares_of(len(messages))
        super().__init__(
            num_shares=shares,
            reconstruction_threshold=secure.threshold_of(shares),
            max_weight=1.0,
            clipping_range=1.0,
            quantization_range=payload.levels,
            modulus_range=MODULUS,
        )
        self.terms, self.messages, self.fewest = terms, messages, secure.fewest

    def run(self, stages: StageGrid, round: int) -> Unmasked | None:
        """All four stages; None where too few clients are left."""
        carrier = _Carrier(list(self.messages))
        empty, nodes = Context(0, 0, {}, RecordDict(), {}), SimpleClientManager()
        nodes.clients = cast(Any, self.messages)  # for a line of its log
        context = LegacyContext(empty, strategy=carrier, client_manager=nodes)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        self(cast(Grid, stages), context)
        return carrier.unmasked

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Flower's, after which the messages of the strategy wait to be sent.

        Each gets its own copy: Flower adds a record for the node, and strategies may share them.
        """
        going_on = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {
            node: RecordDict({**message.content, TERMS: self.terms})
            for node, message in self.messages.items()
        }
        return going_on

    def _check_threshold(self, state: WorkflowState) -> bool:
        """Called after every stage but the last: whether enough clients are left to unmask."""
        left = state.active_node_ids
        if not state.aggregate_ndarrays:  # no masks yet: who is gone leaves nothing to remove
            state.sampled_node_ids = set(left)
            state.nid_to_neighbours = {
                node: near & left for node, near in state.nid_to_neighbours.items() if node in left
            }
        linked = (len(state.nid_to_neighbours[node] & left) for node in state.sampled_node_ids)
        return len(left) >= self.fewest and all(near >= state.threshold for near in linked)


class _Carrier(LegacyFedAvg):
    """What the workflow takes for a strategy: names the nodes, and takes the mean in hand."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__()
        self.nodes = nodes
        self.unmasked: Unmasked | None = None

    def configure_fit(self, *_: Any) -> Any:
        nothing = FitIns(Parameters([], ""), {})
        return [(_Proxy(node), nothing) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        nodes = [proxy.node_id for proxy, _ in results]
        self.unmasked = Unmasked(mean.astype(np.float64), nodes)
        return None, {}


class _Proxy(NamedTuple):
    node_id: int


COARSE = 1e-3  # from this share of rounding in the norms on, the clip is too wide


def secure_gather(
    secure: SecureAggregation,
    server: Server,
    grid: Grid,
    messages: Sequence[Message],
    *,
    key: str,
    round: int,
    timeout: float,
) -> Gathered:
    """The sums of a round; of no clients where it had to be given up, and a line says why.

    Its metrics are `clipped`, how many clients scaled their update down to the clip, and
    `rounding_share`, the part of the mean squared norm that rounding made.

    Args:
        secure: the settings.
        server: whose model the messages carry.
        grid: where the nodes are.
        messages: the train messages, one to a node.
        key: of the model in messages and replies.
        round: the round, counted from 1.
        timeout: seconds for all of it.
    """
    nothing = Gathered(Aggregate.zero(server.layout.dim, server.state.params.dtype))
    if len(messages) < secure.fewest:
        told = "round %d: a secure sum needs %d clients, and there are %d; the model stays as it is"
        log(WARNING, told, round, secure.fewest, len(messages))
        return nothing
    payload = secure.payload(server.algorithm.client, server.layout, len(messages))
    nodes = {message.metadata.dst_node_id: message for message in messages}
    workflow = SecureRound(secure, payload, terms_of(payload, server.layout, key), nodes)
    stages = StageGrid(grid, payload.size, timeout)
    found = _run(workflow, stages, payload, round)
    unanswered = tuple(stages.unanswered)
    without = replace(nothing, dropped=len(stages.refused), unanswered=unanswered)
    if found is None:
        return without
    sums, accepted = found
    return replace(
        without,
        aggregate=_aggregate(server, sums, len(accepted)),
        accepted=accepted,
        metrics=_metrics(payload, sums, len(accepted)),
    )


def _run(
    workflow: SecureRound, stages: StageGrid, payload: Payload, round: int
) -> tuple[Sums, tuple[int, ...]] | None:
    """The sums and whose they are; None where the round must not touch the model."""
    try:
        unmasked = workflow.run(stages, round)
        sums = unmasked and payload.unpack(unmasked.mean, len(unmasked.nodes))
    except Exception as error:  # shares and vectors that do not fit make it raise what it likes
        log(WARNING, "round %d: the secure sum failed (%r); the model stays as it is", round, error)
        return None
    if unmasked is None or sums is None:
        _explain(round, workflow, stages)
        return None
    if not _plausible(payload, sums, len(unmasked.nodes)):
        log(WARNING, "round %d: the secure sum is damaged; the model stays as it is", round)
        return None
    return sums, tuple(unmasked.nodes)


def _aggregate(server: Server, sums: Sums, clients: int) -> Aggregate:
    """The sums as rules know them."""
    state = server.state
    extras = {name: torch.from_numpy(value) for name, value in sums.extras.items()}
    return Aggregate(
        weight=_number(clients),
        update=torch.from_numpy(sums.update).to(state.params.dtype),
        sq_norm=_number(sums.sq_norm),
        count=_number(clients),
        dropped=_number(0),
        extras={name: value.to(state.params.dtype) for name, value in extras.items()},
    )


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _plausible(payload: Payload, sums: Sums, clients: int) -> bool:
    """Whether masks came off: what is left of them breaks ||mean||² <= mean of squares <= C²."""
    sq_norm_of_sum = float(np.square(sums.update).sum())
    least = sq_norm_of_sum / clients / 1.000001 - payload.rounding
    most = clients * (payload.clip**2 * 1.001 + payload.rounding)
    return least <= sums.sq_norm <= most and 0 <= sums.clipped <= clients


def _metrics(payload: Payload, sums: Sums, clients: int) -> dict[str, float]:
    mean_sq_norm = sums.sq_norm / clients
    share = payload.rounding / mean_sq_norm if mean_sq_norm else 0.0
    if share > COARSE:
        log(
            WARNING,
            "updates are %.0e times the clip, so that rounding makes %.1f %% of their squared "
            "norm; lower clip",
            mean_sq_norm**0.5 / payload.clip,
            100 * share,
        )
    return {"clipped": float(sums.clipped), "rounding_share": share}


def _explain(round: int, workflow: SecureRound, stages: StageGrid) -> None:
    asked = len(workflow.messages)
    log(
        WARNING,
        "round %d: %d of %d clients are left, too few to unmask their sum (it takes %s of %s "
        "shares of a key, and %d clients); the model stays as it is",
        round,
        asked - len(stages.refused) - len(stages.unanswered),
        asked,
        workflow.reconstruction_threshold,
        workflow.num_shares,
        workflow.fewest,
    )
