"""One round of Flower's SecAgg+: the sums of the clients' updates, and nothing of any one client.

`secure_aggregate` is to a secure round what `aggregate_replies` is to a plain one. `SecureRound`
runs the four stages of Flower's workflow over a `StageGrid`, which checks the replies of a stage,
limits its time, and sums masked vectors as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray

from fedexp.aggregate import Aggregate
from fedexp.clipping import at_median, follow
from fedexp.engine.base import SUMMED_BYTES
from fedexp.errors import UsageError, require
from fedexp.flower.replies import AggregatedReplies
from fedexp.flower.secure import legacy_workflow
from fedexp.flower.secure.payload import (
    MODULUS,
    PAYLOAD,
    Payload,
    SecureAggregation,
    Sums,
    Vector,
    payload_config,
)
from fedexp.flower.server import GRACE, Server
from fedexp.flower.transport import is_unanswered, reason_of, reply_content, stream_replies

with legacy_workflow():
    from flwr.common import (
        FitIns,
        Parameters,
        bytes_to_ndarray,
        ndarray_to_bytes,
        parameters_to_ndarrays,
    )
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
    from flwr.server import LegacyContext, SimpleClientManager
    from flwr.server.strategy import FedAvg as LegacyFedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
    from flwr.server.workflow.constant import Key as WorkflowKey
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

Masked = list[NDArray[np.int64]]

MAX_WAIT = 300.0  # seconds for a stage without training; a node may have to start its app
STAGES = {
    Stage.SETUP: "before it sent its keys",
    Stage.SHARE_KEYS: "before it shared its keys",
    Stage.COLLECT_MASKED_VECTORS: "before it sent its masked update",
    Stage.UNMASK: "before the sum was unmasked",
}
NO_MOD = "an app without the mod fails here: add mods=[secure_mod] to its ClientApp"
COARSE = 1e-3  # fraction of the squared norm due to rounding from which the clip is too wide


def secure_aggregate(
    secure: SecureAggregation,
    server: Server,
    grid: Grid,
    messages: Sequence[Message],
    *,
    key: str,
    round: int,
    timeout: float,
) -> AggregatedReplies:
    """Return the sums of a round; those of no clients where it failed, with the reason in the log.

    Its metrics are `clipped`, how many clients scaled their update down to the clip, and
    `rounding_share`, the fraction of the mean squared norm that is due to rounding. Where the
    algorithm has a bound the clip follows the updates: then `clip`, and instead of `clipped` how
    many are `longer` than the median so far, all that the server learns of norms beside their sum.

    Args:
        secure: the settings.
        server: whose model the messages carry.
        grid: of the ServerApp.
        messages: the train messages, one per node.
        key: of the model in messages and replies.
        round: counted from 1.
        timeout: seconds for the four stages together.
    """
    empty = AggregatedReplies(Aggregate.zero(server.layout.dim, server.state.params.dtype))
    if len(messages) < secure.fewest:
        text = "round %d: a secure sum needs %d clients, and there are %d; the model is unchanged"
        log(WARNING, text, round, secure.fewest, len(messages))
        return empty
    algorithm = server.algorithm
    secure = at_median(secure, algorithm.limits(server.state.server))
    payload = secure.payload(algorithm.client, server.layout, len(messages), algorithm.bound)
    nodes = {message.metadata.dst_node_id: message for message in messages}
    workflow = SecureRound(secure, payload, payload_config(payload, server.layout, key), nodes)
    stages = StageGrid(grid, payload.size, timeout)
    try:
        sums, accepted = _unmasked_sums(workflow, stages, payload, round)
    except Exception as error:  # malformed shares or vectors raise many types
        reason = error if isinstance(error, UsageError) else f"the secure sum failed ({error!r})"
        log(WARNING, "round %d: %s; the model is unchanged", round, reason)
    else:
        empty = replace(
            empty,
            aggregate=_aggregate(server, payload, sums, len(accepted)),
            accepted=accepted,
            metrics=_metrics(algorithm.bound, payload, sums, len(accepted)),
        )
    return replace(empty, dropped=len(stages.refused), unanswered=tuple(stages.unanswered))


def _unmasked_sums(
    workflow: SecureRound, stages: StageGrid, payload: Payload, round: int
) -> tuple[Sums, tuple[int, ...]]:
    """Return the sums and the nodes in them; raise `UsageError` where they must not be used."""
    unmasked = workflow.run(stages, round)
    if unmasked is None:
        clients = len(workflow.messages)
        raise UsageError(
            f"{clients - len(stages.refused) - len(stages.unanswered)} of {clients} clients are "
            "left, too few to unmask their sum (it takes "
            f"{workflow.reconstruction_threshold} of {workflow.num_shares} shares of a key, and "
            f"{workflow.fewest} clients)"
        )
    sums = payload.unpack(unmasked.mean, len(unmasked.nodes))
    require(_plausible(payload, sums, len(unmasked.nodes)), "the secure sum is damaged")
    return sums, tuple(unmasked.nodes)


def _aggregate(server: Server, payload: Payload, sums: Sums, clients: int) -> Aggregate:
    """Return the sums as an `Aggregate`, with the next median where there is a bound."""
    dtype = server.state.params.dtype
    count = torch.tensor(clients, dtype=torch.float64)
    median = {}
    if server.algorithm.bound is not None:
        median = follow(payload.clip / payload.bound, (2 * sums.longer - count) / clients)
    return replace(
        Aggregate.zero(server.layout.dim, dtype),
        weight=count,
        update=torch.from_numpy(sums.update).to(dtype),
        sq_norm=torch.tensor(sums.sq_norm, dtype=torch.float64),
        count=count,
        extras=median | {n: torch.from_numpy(value).to(dtype) for n, value in sums.extras.items()},
    )


def _plausible(payload: Payload, sums: Sums, clients: int) -> bool:
    """Return whether the masks were removed: else ||mean||² <= mean of ||·||² <= C² fails."""
    sq_norm_of_sum = float(np.square(sums.update).sum())
    least = sq_norm_of_sum / clients / 1.000001 - payload.rounding
    most = clients * (payload.clip**2 * 1.001 + payload.rounding)
    return least <= sums.sq_norm <= most and 0 <= sums.longer <= clients


def _metrics(bound: float | None, payload: Payload, sums: Sums, clients: int) -> dict[str, float]:
    mean_sq_norm = sums.sq_norm / clients
    share = payload.rounding / mean_sq_norm if mean_sq_norm else 0.0
    if share > COARSE:
        log(
            WARNING,
            "updates are %.0e times the clip, so that rounding is %.1f %% of their squared norm; "
            "lower clip",
            mean_sq_norm**0.5 / payload.clip,
            100 * share,
        )
    counted = {"clipped": float(sums.longer)}
    if bound is not None:
        counted = {"longer": float(sums.longer), "clip": payload.clip}
    return {**counted, "rounding_share": share}


class Unmasked(NamedTuple):
    """The mean of the vectors of a round, and the nodes they came from."""

    mean: Vector
    nodes: list[int]


class SecureRound(SecAggPlusWorkflow):
    """Flower's SecAgg+ workflow over the messages of a strategy, for one round.

    Flower's class requests the keys of clients that were lost before they shared any, which nobody
    has, and then fails for all. Here such clients are discarded: the sum has no masks for them.

    Args:
        secure: shares and threshold.
        payload: the encoding of updates.
        config: the record that describes the payload to clients.
        messages: the train message of each node.
    """

    def __init__(
        self,
        secure: SecureAggregation,
        payload: Payload,
        config: ConfigRecord,
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
        self.config, self.messages, self.fewest = config, messages, secure.fewest

    def run(self, stages: StageGrid, round: int) -> Unmasked | None:
        """Run the four stages; return None where too few clients are left."""
        strategy = _LegacyStrategy(list(self.messages))
        empty, nodes = Context(0, 0, {}, RecordDict(), {}), SimpleClientManager()
        nodes.clients = cast(Any, self.messages)  # the workflow logs their number
        context = LegacyContext(empty, strategy=strategy, client_manager=nodes)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        self(cast(Grid, stages), context)
        return strategy.unmasked

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Run Flower's stage, then set the messages of the strategy as those to be sent.

        Each is copied: Flower adds a record for the node, and strategies may share their content.
        """
        succeeded = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {
            node: RecordDict({**message.content, PAYLOAD: self.config})
            for node, message in self.messages.items()
        }
        return succeeded

    def _check_threshold(self, state: WorkflowState) -> bool:
        """Return whether enough clients are left to unmask; not called after the last stage."""
        left = state.active_node_ids
        if not state.aggregate_ndarrays:  # no masks yet, so lost clients leave none to remove
            state.sampled_node_ids = set(left)
            state.nid_to_neighbours = {
                node: near & left for node, near in state.nid_to_neighbours.items() if node in left
            }
        linked = (len(state.nid_to_neighbours[node] & left) for node in state.sampled_node_ids)
        return len(left) >= self.fewest and all(near >= state.threshold for near in linked)


class _LegacyStrategy(LegacyFedAvg):
    """The strategy that Flower's workflow requires: names the nodes, and receives the mean."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__()
        self.nodes = nodes
        self.unmasked: Unmasked | None = None

    def configure_fit(self, *_: Any) -> Any:
        unused = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), unused) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        nodes = [proxy.node_id for proxy, _ in results]
        self.unmasked = Unmasked(mean.astype(np.float64), nodes)
        return None, {}


@dataclass
class StageGrid:
    """The grid that Flower's workflow uses in one round.

    Args:
        grid: of the ServerApp.
        size: length of the vector that a client masks.
        timeout: seconds for the whole round.

    Attributes:
        refused: nodes that dropped out with an error or an unusable reply.
        unanswered: nodes that did not answer.
    """

    grid: Grid
    size: int
    timeout: float
    refused: list[int] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    _start: float = field(default_factory=monotonic, init=False)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the usable replies; a node without one has dropped out."""
        sent = {message.metadata.dst_node_id: message for message in messages}
        if not sent:
            return []
        stage = str(_protocol(next(iter(sent.values())))[Key.STAGE])
        is_training = stage == Stage.COLLECT_MASKED_VECTORS
        chunk = max(1, SUMMED_BYTES // (8 * self.size)) if is_training else len(sent)
        limit = self._limit(stage)
        for message in sent.values():
            message.metadata.ttl = limit + GRACE  # a node need not process it any later
        replies = stream_replies(self.grid, sent.values(), limit, chunk)
        usable = self._usable(stage, sent, replies)
        return _with_summed_vectors(usable) if is_training else list(usable)

    def _limit(self, stage: str) -> float:
        """Return the seconds for a stage, which leave time for the later ones."""
        left = max(0.0, self.timeout - (monotonic() - self._start))
        if stage == Stage.UNMASK:
            return left
        if stage == Stage.COLLECT_MASKED_VECTORS:
            return max(left / 2, left - min(MAX_WAIT, self.timeout / 5))
        return min(MAX_WAIT, left / 2)

    def _usable(
        self, stage: str, sent: dict[int, Message], replies: Iterable[Message]
    ) -> Iterator[Message]:
        for reply in replies:
            node = reply.metadata.src_node_id
            fault = _fault(stage, sent[node], reply, self.size)
            if fault is None:
                yield reply
                continue
            (self.unanswered if is_unanswered(reply) else self.refused).append(node)
            log(WARNING, "node %d left the secure sum %s: %s", node, STAGES[stage], fault)


def _with_summed_vectors(replies: Iterable[Message]) -> list[Message]:
    """Return the replies with the sum of all masked vectors in the first, and zeros in the others.

    Flower holds all vectors of a round and then adds them; summed as they arrive, at most two are
    in memory. The zeros do not change its sum.
    """
    summed: list[Message] = []
    total: Masked | None = None
    for reply in replies:
        masked = _masked(reply)
        if total is not None:
            masked = [(a + b) & (MODULUS - 1) for a, b in zip(total, masked, strict=True)]
        total = masked
        zero = ndarray_to_bytes(np.zeros((), np.int64))
        reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS] = [zero, zero]
        summed.append(reply)
    if total is not None:
        first = summed[0].content.config_records[RECORD_KEY_CONFIGS]
        first[Key.MASKED_PARAMETERS] = [ndarray_to_bytes(array) for array in total]
    return summed


def _fault(stage: str, sent: Message, reply: Message, size: int) -> str | None:
    """Return why a reply cannot be used, None where it can; Flower's workflow would crash."""
    try:
        reply_content(reply)
        is_valid = _is_valid(stage, sent, reply, size)
    except UsageError as error:
        is_first = stage == Stage.SETUP and not is_unanswered(reply)
        return f"{reason_of(error)} ({NO_MOD})" if is_first else reason_of(error)
    except Exception:  # malformed replies raise many types
        is_valid = False
    return None if is_valid else "its reply is damaged, or its app lacks fedexp.flower.secure_mod"


def _is_valid(stage: str, sent: Message, reply: Message, size: int) -> bool:
    """Return whether a reply has the contents of its stage; may raise for a malformed one."""
    answer = _protocol(reply)
    if stage == Stage.SETUP:
        return all(isinstance(answer[key], bytes) for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
    if stage == Stage.SHARE_KEYS:
        nodes, texts = answer[Key.DESTINATION_LIST], answer[Key.CIPHERTEXT_LIST]
        return len(nodes) == len(texts) and all(isinstance(text, bytes) for text in texts)
    if stage == Stage.COLLECT_MASKED_VECTORS:
        examples = reply.content.metric_records["fitres.num_examples"]["num_examples"]
        arrays = _masked(reply)
        integers = all(array.dtype == np.int64 for array in arrays)
        return examples == 1 and integers and [a.shape for a in arrays] == [(1,), (size,)]
    request = _protocol(sent)
    requested = {*request[Key.ACTIVE_NODE_ID_LIST], *request[Key.DEAD_NODE_ID_LIST]}
    nodes, shares = answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST]
    return len(nodes) == len(shares) and {*nodes} <= requested


def _protocol(message: Message) -> dict[str, Any]:
    """Return the record of Flower's protocol in a message."""
    return dict(message.content.config_records[RECORD_KEY_CONFIGS])


def _masked(reply: Message) -> Masked:
    return [bytes_to_ndarray(data) for data in _protocol(reply)[Key.MASKED_PARAMETERS]]
