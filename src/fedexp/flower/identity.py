"""Who a client is, in a way that survives a restart of its node."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedexp.errors import UsageError, require

PARTITION = "partition-id"
QUERY = "fedexp"  # the server asks with a message of type "query.fedexp"


def client_name(context: Context) -> str:
    """The name of this client: `fedexp-client` or `partition-id` of its node, else the node's id.

    A node gets a new id when it is restarted, unless it signs in with a key of its own.

    >>> client_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    """
    return _configured(context) or f"node-{context.node_id}"


def own_name(context: Context) -> str:
    """Return the client's name by its node's own configuration; one name for all that have none.

    The SuperLink draws the ids of nodes, so nothing that must hold against the server may depend
    on one.

    >>> own_name(Context(1, 77, {"partition-id": 3}, RecordDict(), {}))
    '3'
    >>> own_name(Context(1, 77, {}, RecordDict(), {}))
    'client'
    """
    return _configured(context) or "client"


def _configured(context: Context) -> str | None:
    for key in ("fedexp-client", PARTITION):
        if key in context.node_config:
            return str(context.node_config[key])
    return None


def partition_of(context: Context, clients: int) -> int:
    """Which of the clients of a federation this node trains."""
    told = context.node_config.get(PARTITION)
    if not isinstance(told, int):
        raise UsageError(
            "the node has no partition-id; start it with --node-config 'partition-id=0' "
            f"(one number from 0 to {clients - 1} for each node)"
        )
    require(
        0 <= told < clients,
        f"partition-id is {told}, but the federation has the clients 0 to {clients - 1}",
    )
    return told


def identify(app: ClientApp) -> None:
    """Let a ClientApp tell the server who it is: one line, `fedexp.flower.identify(app)`.

    With it the server draws the same cohorts whatever ids the nodes happen to get, and knows a
    client again after its node was restarted. Nothing else is told than the name.
    """
    app.query(QUERY)(_answer)


def _answer(message: Message, context: Context) -> Message:
    told = ConfigRecord({"client": client_name(context)})
    partition = context.node_config.get(PARTITION)
    if isinstance(partition, int):
        told[PARTITION] = partition
    return Message(RecordDict({"fedexp": told}), reply_to=message)
