"""Rounds of secure aggregation in this process, beside the plain ones they must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedexp import Aggregate, Algorithm, fedexp
from fedexp.flower import Server
from fedexp.flower.replies import AggregatedReplies
from fedexp.flower.secure.client import secure_mod
from fedexp.flower.secure.payload import SecureAggregation
from fedexp.flower.secure.round import secure_aggregate
from tests.flower.helpers.fake_grid import Answer, FakeGrid, Fault

Update = Callable[[int, int], np.ndarray]


def random_updates(dim: int, norm: float = 1.0) -> Update:
    """Updates by (client, round), of unequal norms and with something in common."""

    def update(client: int, round: int) -> np.ndarray:
        own = np.random.default_rng((client, round)).normal(size=dim)
        both = own + 0.5 * np.random.default_rng((99, round)).normal(size=dim)
        return (norm * (0.4 + 0.1 * client) * both / np.linalg.norm(both)).astype(np.float32)

    return update


def app_of(update: Update, mod: Any = secure_mod) -> ClientApp:
    """A plain Flower app that knows nothing of secure sums; it moves by -update."""
    app = ClientApp(mods=[mod] if mod else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = message.content.array_records["arrays"]["w"].numpy()
        round: Any = message.content.config_records["config"]["server-round"]
        content = RecordDict({"arrays": ArrayRecord({"w": Array(model - update(client, round))})})
        content["metrics"] = MetricRecord({"num-examples": 10 + client, "loss": 1.5 + client})
        return Message(content, reply_to=message)

    return app


def server_of(dim: int, algorithm: Algorithm | None = None) -> Server:
    arrays = ArrayRecord({"w": Array(np.zeros(dim, np.float32))})
    return Server(algorithm or fedexp(eps=1e-3), arrays)


def secure_round(
    server: Server, grid: FakeGrid, secure: SecureAggregation, round: int = 1, timeout: float = 60
) -> AggregatedReplies:
    config = ConfigRecord({"server-round": round})
    content = RecordDict({"arrays": server.model(), "config": config})  # one for all, as strategies
    messages = [
        Message(content=content, message_type="train", dst_node_id=node, group_id=str(round))
        for node in grid.get_node_ids()
    ]
    return secure_aggregate(
        secure, server, grid, messages, key="arrays", round=round, timeout=timeout
    )


def plain_sums(update: Update, clients: list[int], round: int = 1) -> Aggregate:
    return Aggregate.of(torch.from_numpy(np.stack([update(c, round) for c in clients])))


def at_stage(stage: str, fault: Fault) -> Fault:
    """A fault in one stage of the protocol only."""

    def sometimes(message: Message, answer: Answer) -> Message | None:
        record = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        return fault(message, answer) if record.get("stage") == stage else answer()

    return sometimes


def positions(grid: FakeGrid, nodes: tuple[int, ...]) -> list[int]:
    return sorted(grid.position(node) for node in nodes)
