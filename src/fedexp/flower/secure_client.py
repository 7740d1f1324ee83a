"""`secure_mod`: the client's side of secure aggregation, around a train function as it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedexp.errors import UsageError, require
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.local_privacy import quietly
from fedexp.flower.request import EXTRAS, ties_in
from fedexp.flower.secure_legacy import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Code,
    FitRes,
    Key,
    Stage,
    Status,
    fitres_to_recorddict,
    ndarrays_to_parameters,
    secaggplus_mod,
)
from fedexp.flower.secure_payload import MODULUS, TERMS, Vector, payload_of
from fedexp.objective import buffer_changes

OTHER_SERVER = "the server's secure aggregation is another one; use a strategy of fedexp.flower"


@dataclass(frozen=True)
class SecureMod:
    """Let a client give its update to secure sums only: `ClientApp(mods=[secure_mod])`.

    What the train function replies stays on the client. Its update w - w_i is clipped, rounded and
    masked; its metrics and its number of examples are not sent at all, and the text of an error
    that it raises neither.

    Args:
        fewest: clients that a round must have for this one to take part, whatever the server says.
    """

    fewest: int = 3

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if kind.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        stage = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if stage is None or kind != MessageType.TRAIN:  # Flower's mod lets "train.default" pass
            raise UsageError(
                "this client gives its update to secure sums only, and the server asks for it in "
                "the clear; give the strategy secure=SecureAggregation(clip=...)"
            )
        self._consent(stage, context)
        return secaggplus_mod(message, context, partial(_packed, call_next))

    def _consent(self, told: ConfigRecord, context: Context) -> None:
        """Refuse terms under which one client's update could be seen."""
        stage: dict[str, Any] = dict(told)
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
                len(active) >= self.fewest or not _sees_all(context),
                f"of the clients of this sum {len(active)} are left, and this one takes part in "
                f"sums of at least {self.fewest}",
            )


secure_mod = SecureMod()


def _packed(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    """The reply of the train function as Flower's mod wants to have it."""
    terms = message.content.config_records.pop(TERMS, None)
    if terms is None:
        raise UsageError(OTHER_SERVER)
    del message.content[RECORD_KEY_CONFIGS]  # the train function sees the message it always sees
    key = str(terms["model"])
    sent = ndarrays(message.content.array_records[key])
    reply = quietly(call_next, message, context)
    layout = Layout.of(sent, cast(list[str], terms["buffers"]), ties_in(terms, ""))
    payload = payload_of(terms, _levels(context), layout.dim)
    update, extras = _contribution(layout, sent, reply, key)
    told = {name: value.size for name, value in extras.items()}
    require(
        told == dict(payload.extras),
        f"the server wants {dict(payload.extras)} beside the update, but the client has {told}; "
        "use fedexp.flower.LocalRule in its train function",
    )
    return Message(_result(payload.pack(update, extras)), reply_to=message)


def _contribution(
    layout: Layout, sent: dict[str, Any], reply: RecordDict, key: str
) -> tuple[Vector, dict[str, Vector]]:
    """The update, and what else is summed: the rule's extras and the change of the buffers."""
    require(key in reply.array_records, f"the reply of the train function has no {key!r}")
    trained = ndarrays(reply.array_records[key])
    misfit = layout.misfit(trained)
    require(misfit is None, f"the model that the train function replied does not fit: {misfit}")
    extras = ndarrays(reply.array_records.get(EXTRAS, ArrayRecord()))
    if layout.averaged:
        after, before = (layout.buffers(each).averaged for each in (trained, sent))
        extras["buffers"] = buffer_changes(after, before).numpy()
    update = layout.flat(sent) - layout.flat(trained)
    return update.double().numpy(), {k: v.astype(np.float64) for k, v in extras.items()}


def _levels(context: Context) -> int:
    """The levels that the set-up of the round has announced."""
    state = _agreed(context)
    ours = (state["clipping_range"], state["max_weight"], state["mod_range"]) == (1, 1, MODULUS)
    require(ours and state["target_range"] * state["sample_num"] < MODULUS, OTHER_SERVER)
    return int(state["target_range"])


def _sees_all(context: Context) -> bool:
    """Whether every client of the round shares keys with this one, so that it can count them."""
    state = _agreed(context)
    return bool(state.get("sample_num", 0) <= state.get("share_num", 0))


def _agreed(context: Context) -> dict[str, Any]:
    """What Flower's mod remembers of the set-up of the round."""
    return dict(context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()))


def _result(vector: Vector) -> RecordDict:
    """What Flower's mod masks; the number of examples is the same for every client."""
    parameters = ndarrays_to_parameters([vector])
    result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
    return fitres_to_recorddict(result, keep_input=False)
