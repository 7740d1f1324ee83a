"""Flower's SecAgg+ over the messages of a strategy, for one round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from fedexp.flower.secure import TERMS, SecureAggregation
from fedexp.flower.secure_legacy import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    FitIns,
    LegacyContext,
    LegacyFedAvg,
    Parameters,
    SecAggPlusWorkflow,
    SimpleClientManager,
    WorkflowKey,
    WorkflowState,
    parameters_to_ndarrays,
)
from fedexp.flower.secure_payload import MODULUS, Payload, Vector
from fedexp.flower.secure_stages import StageGrid


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
