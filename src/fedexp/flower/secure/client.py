"""`secure_mod`: the client side of secure aggregation, a mod around any train function.

The update is clipped, rounded and masked on the client. Settings under which the server could see
the update of one client are refused, whatever the server is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedexp.errors import UsageError, require
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.privacy import train_with_hidden_errors
from fedexp.flower.request import EXTRAS, read_ties
from fedexp.flower.secure import legacy_workflow
from fedexp.flower.secure.payload import MODULUS, PAYLOAD, Vector, read_payload
from fedexp.objective import buffer_changes

with legacy_workflow():
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS,
        RECORD_KEY_STATE,
        Key,
        Stage,
    )
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

OTHER_SERVER = (
    "the server does not use the secure aggregation of this package; use a strategy of "
    "fedexp.flower"
)


@dataclass(frozen=True)
class SecureMod:
    """A mod that sends a client's update to secure sums only: `ClientApp(mods=[secure_mod])`.

    The update w - w_i of the train function's reply is clipped, rounded and masked; its metrics,
    its number of examples and the text of an error that it raises are not sent at all.

    Args:
        fewest: clients that a round must have for this one to take part, whatever the server asks.
    """

    fewest: int = 3

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if kind.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        stage = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if stage is None or kind != MessageType.TRAIN:  # Flower's mod lets "train.default" pass
            raise UsageError(
                "this client sends its update to secure sums only, and the server asks for it in "
                "the clear; give the strategy secure=SecureAggregation(clip=...)"
            )
        self._check_stage(stage, context)
        return secaggplus_mod(message, context, partial(_packed_reply, call_next))

    def _check_stage(self, config: ConfigRecord, context: Context) -> None:
        """Refuse settings under which the update of one client could be seen."""
        stage: dict[str, Any] = dict(config)
        if stage.get(Key.STAGE) == Stage.SETUP:
            clients, shares = stage[Key.SAMPLE_NUMBER], stage[Key.SHARE_NUMBER]
            require(
                clients >= self.fewest and 2 * stage[Key.THRESHOLD] > shares,
                f"this client takes part in secure sums of at least {self.fewest} clients whose "
                f"threshold is above half of the shares, not of {clients} clients with "
                f"{stage[Key.THRESHOLD]} of {shares} shares",
            )
        if stage.get(Key.STAGE) == Stage.UNMASK:
            active = {*stage[Key.ACTIVE_NODE_ID_LIST]}
            both = active & {*stage[Key.DEAD_NODE_ID_LIST]}
            require(not both, "the server asks for both secrets of a client; that would unmask it")
            require(
                len(active) >= self.fewest or not _shares_with_all(context),
                f"of the clients of this sum {len(active)} are left, and this one takes part in "
                f"sums of at least {self.fewest}",
            )


secure_mod = SecureMod()
"""The mod of a ClientApp whose updates are summed by secure aggregation: `mods=[secure_mod]`."""


def _packed_reply(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    """Return the reply of the train function as Flower's mod takes it: one vector to be masked."""
    config = message.content.config_records.pop(PAYLOAD, None)
    if config is None:
        raise UsageError(OTHER_SERVER)
    del message.content[RECORD_KEY_CONFIGS]  # the train function sees the usual message
    key = str(config["model"])
    sent = ndarrays(message.content.array_records[key])
    reply = train_with_hidden_errors(call_next, message, context)
    layout = Layout.of(sent, cast(list[str], config["buffers"]), read_ties(config, ""))
    payload = read_payload(config, _levels(context), layout.dim)
    update, extras = _update(layout, sent, reply, key)
    sizes = {name: value.size for name, value in extras.items()}
    require(
        sizes == dict(payload.extras),
        f"the server needs {dict(payload.extras)} beside the update, but the client has {sizes}; "
        "use fedexp.flower.LocalRule in its train function",
    )
    parameters = ndarrays_to_parameters([payload.pack(update, extras)])
    result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


def _update(
    layout: Layout, sent: dict[str, Any], reply: RecordDict, key: str
) -> tuple[Vector, dict[str, Vector]]:
    """Return the update, and what else is summed: the rule's extras and the change of buffers."""
    require(key in reply.array_records, f"the reply of the train function has no {key!r}")
    trained = ndarrays(reply.array_records[key])
    misfit = layout.misfit(trained)
    require(misfit is None, f"the model that the train function replied does not fit: {misfit}")
    extras = ndarrays(reply.array_records.get(EXTRAS, ArrayRecord()))
    if layout.averaged:
        after, before = layout.buffers(trained).averaged, layout.buffers(sent).averaged
        extras["buffers"] = buffer_changes(after, before).numpy()
    update = layout.flat(sent) - layout.flat(trained)
    return update.double().numpy(), {k: v.astype(np.float64) for k, v in extras.items()}


def _levels(context: Context) -> int:
    """Return the quantisation levels that the set-up stage of the round announced."""
    state = _setup_state(context)
    ranges = state["clipping_range"], state["max_weight"], state["mod_range"]
    fits = state["target_range"] * state["sample_num"] < MODULUS
    require(ranges == (1, 1, MODULUS) and fits, OTHER_SERVER)
    return int(state["target_range"])


def _shares_with_all(context: Context) -> bool:
    """Return whether this client shares keys with all of the round, so that it can count them."""
    state = _setup_state(context)
    return bool(state.get("sample_num", 0) <= state.get("share_num", 0))


def _setup_state(context: Context) -> dict[str, Any]:
    """Return the state that Flower's mod stored in the set-up stage of the round."""
    return dict(context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()))
