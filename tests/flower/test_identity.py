"""A client tells who it is, in a way that survives a restart of its node."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedexp.flower import report_client_id
from fedexp.flower.client_state import client_name
from tests.flower.helpers.fake_grid import FakeGrid


def answer(config: dict[str, Any]) -> tuple[ConfigRecord, int]:
    app = ClientApp()
    report_client_id(app)
    grid = FakeGrid(app, [config])
    node = grid.nodes[0].node_id
    asked = Message(RecordDict(), dst_node_id=node, message_type="query.fedexp")
    (reply,) = grid.send_and_receive([asked])
    return reply.content.config_records["fedexp"], node


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"partition-id": 3, "secret": "x"}, {"client": "3", "partition-id": 3}),
        (
            {"partition-id": 3, "fedexp-client": "ward-7"},
            {"client": "ward-7", "partition-id": 3},
        ),
    ],
)
def test_a_client_tells_its_name_and_nothing_else(
    config: dict[str, Any], told: dict[str, Any]
) -> None:
    assert dict(answer(config)[0]) == told


def test_a_node_without_a_partition_goes_by_its_id() -> None:
    told, node = answer({})
    assert dict(told) == {"client": f"node-{node}"}
    assert client_name(Context(9, node, {}, RecordDict(), {})) == f"node-{node}"
