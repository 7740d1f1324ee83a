"""A ClientApp without fedexp: each client moves half way to a target of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

DIM = 5


def first_model() -> ArrayRecord:
    """Parameters, BatchNorm's statistics and a counter."""
    return record(np.zeros(DIM, np.float32), 0.0, 0)


def record(w: NDArray[Any], mean: float, steps: int) -> ArrayRecord:
    return ArrayRecord(
        {
            "w": Array(w),
            "bn.running_mean": Array(np.array([mean], np.float32)),
            "bn.num_batches_tracked": Array(np.array(steps)),
        }
    )


def target(client: int) -> NDArray[Any]:
    return np.random.default_rng(client).normal(size=DIM).astype(np.float32)


def examples(client: int) -> int:
    return 10 * (client + 1)


def plain_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        sent = message.content.array_records["arrays"]
        w = sent["w"].numpy()
        moved = (w + 0.5 * (target(client) - w)).astype(np.float32)
        steps = int(sent["bn.num_batches_tracked"].numpy()) + 5
        metrics = MetricRecord({"num-examples": examples(client), "train_loss": float(client)})
        content = RecordDict({"arrays": record(moved, float(client), steps), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        w = message.content.array_records["arrays"]["w"].numpy()
        loss = float(np.square(w - target(client)).sum())
        metrics = MetricRecord({"num-examples": examples(client), "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app
