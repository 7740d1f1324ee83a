"""A minimal server, and its train messages, for tests of the client side."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.client import Prox, Scaffold
from fedexp.flower.layout import Layout, named_parts, ndarrays
from fedexp.flower.request import BROADCAST, EXTRAS, layout_config
from fedexp.flower.server import Server
from tests.flower.helpers.fake_grid import FakeGrid

CONTROL = 0.25  # of every entry of the control variate in `train_message`
NAMES = {fx.SGD: "sgd", Prox: "prox", Scaffold: "scaffold"}


class Rounds:
    """Rounds of an algorithm over the nodes of a grid.

    Attributes:
        server: the server's state.
        accepted: by position, the last round whose reply was used.
        replies: those of the last round, used or not.
        config: further config of the messages, e.g. the study.
    """

    def __init__(
        self,
        grid: FakeGrid,
        algorithm: fx.Algorithm,
        arrays: ArrayRecord,
        buffers: Collection[str] | None = None,
        **config: Any,
    ) -> None:
        self.grid, self.algorithm = grid, algorithm
        self.server = Server(algorithm, arrays, buffers)
        self.accepted: dict[int, int] = {}
        self.replies: list[Message] = []
        self.config = {"fedexp.api": "study", **config}
        self.sends_accepted = True

    def message(self, position: int, round: int) -> Message:
        """What a node is sent."""
        rule = self.algorithm.client
        config = ConfigRecord({"server-round": round, "fedexp.client": NAMES[type(rule)]})
        config.update(self.config)
        if isinstance(rule, Prox):
            config["fedexp.mu"] = rule.mu
        if self.sends_accepted:
            config["fedexp.accepted"] = self.accepted.get(position, 0)
        content = RecordDict({"arrays": self.server.model(), "config": config})
        if (broadcast := self.server.broadcast()) is not None:
            content[BROADCAST] = broadcast
        node = self.grid.nodes[position].node_id
        return Message(content, dst_node_id=node, message_type="train")

    def run(
        self, positions: Iterable[int], accepted: Collection[int] | None = None
    ) -> dict[str, float]:
        """One round over some nodes; `accepted` are those whose replies are used, or all."""
        round = self.server.state.round + 1
        sent = [self.message(position, round) for position in positions]
        self.replies = list(self.grid.send_and_receive(sent))
        used = Aggregate.zero(self.server.layout.dim, self.server.state.params.dtype)
        start = self.server.start_point()
        for reply in self.replies:
            position = self.grid.position(reply.metadata.src_node_id)
            assert reply.has_content(), reply.error
            if accepted is None or position in accepted:
                used = used + self._one(reply.content, start)
                self.accepted[position] = round
        return self.server.step(used, float(len(self.grid.nodes)))

    def _one(self, content: RecordDict, start: torch.Tensor) -> Aggregate:
        arrays = ndarrays(content.array_records["arrays"])
        assert self.server.layout.misfit(arrays) is None
        delta, extras = self.server.contribution(arrays, start)
        for name, value in content.array_records.get(EXTRAS, ArrayRecord()).items():
            extras[name] = torch.from_numpy(value.numpy())
        rows = {name: value[None] for name, value in extras.items()}
        return Aggregate.of(delta[None], extras=rows)


def train_message(
    model: nn.Module, rule: str = "scaffold", **config: Any
) -> tuple[Message, Context]:
    """A train message for this model, with a constant control variate at the server.

    As after the first round, it has the layout of the model.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    arrays = ArrayRecord(dict(model.state_dict()))
    layout = Layout.of(arrays, *named_parts(model))
    values: dict[str, Any] = {"server-round": 1, "fedexp.client": rule, "fedexp.mu": 0.5}
    values |= layout_config(layout) | config
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(values)})
    control = np.full(layout.dim, CONTROL, "float32")
    content[BROADCAST] = ArrayRecord({"control": Array(control)})
    message = Message(content, dst_node_id=7, message_type="train")
    return message, Context(1, 7, {"partition-id": 0}, RecordDict(), {})
