"""A federation whose updates are known vectors of norm 1, for the tests of privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedexp.flower import FedExP, RuleStrategy
from fedexp.flower.layout import ndarrays
from tests.flower.helpers.fake_grid import FakeGrid

DIM, NODES = 400, 30


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(DIM, np.float32)), "n": Array(np.array(3))})


def update(client: int) -> NDArray[Any]:
    """Of norm 1, with a part that all clients share."""
    own = np.random.default_rng(client).normal(size=DIM)
    own[0] = 0.4 * math.sqrt(DIM)
    return (own / np.linalg.norm(own)).astype(np.float32)


def app(mods: list[Any] | None = None, scale: float = 1.0) -> ClientApp:
    """Each client moves by its own vector, whatever it is sent."""
    made = ClientApp(mods=mods)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        moved = message.content.array_records["arrays"]["w"].numpy() - scale * update(client)
        arrays = ArrayRecord({"w": Array(moved), "n": Array(np.array(99))})
        metrics = MetricRecord({"num-examples": 10 * client + 1, "train_loss": float(client)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return made


def metrics_of(strategy: RuleStrategy, grid: FakeGrid, rounds: int = 1) -> list[Any]:
    result = strategy.start(grid, model(), rounds)
    return [result.train_metrics_clientapp[k] for k in range(1, rounds + 1)]


def strategy(rule: Callable[..., RuleStrategy] = FedExP, **options: Any) -> RuleStrategy:
    return rule(fraction_evaluate=0.0, **options)


def weights(arrays: ArrayRecord) -> NDArray[Any]:
    return ndarrays(arrays)["w"].copy()
