"""`TrainRequest`: a train message as a client reads it, and the reply to it.

A message carries the model, the client rule with its broadcast state, and the round whose client
state the server has accepted. All of it is checked here: what another server sends must not crash
a client, nor write outside its folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedexp.client import SGD, ClientRule, Prox, Scaffold, Tensors
from fedexp.errors import UsageError, require, shown, unknown_name
from fedexp.flower.client_state import ClientStateFolder, client_name, state_root
from fedexp.flower.layout import Layout, loaded, named_parts, to_record, to_vector
from fedexp.flower.metrics import Metrics
from fedexp.flower.transport import only_record

# records of messages and replies, beside the model, the config and the metrics
BROADCAST, EXTRAS, REPLY_INFO = "fedexp.shared", "fedexp.extras", "fedexp.about"
CLIENT_RULES: dict[str, type[ClientRule]] = {"sgd": SGD, "prox": Prox, "scaffold": Scaffold}
log = logging.getLogger("flwr")


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A train message.

    Attributes:
        message: the message to reply to.
        key: of the model, in the message and in the reply.
        arrays: the model that the round starts from.
        start: its parameters as one vector [d].
        layout: how the server turns arrays into vectors.
        rule: the client rule to train with.
        broadcast: the server's state of that rule, vectors [d].
        round: counted from 1.
        base: the round whose client state this one starts from; 0 for a fresh state.
        client_state: that state, vectors [d].
        store: of the client's states.
        reply_info: what the reply reports beside the update: the client rule, and, where the server
            left it undecided, which arrays are buffers and which parameters are tied.
    """

    message: Message
    key: str
    arrays: ArrayRecord
    start: Tensor
    layout: Layout
    rule: ClientRule
    broadcast: Tensors
    round: int
    base: int
    client_state: Tensors
    store: ClientStateFolder
    reply_info: Mapping[str, Any]

    @classmethod
    def of(cls, message: Message, context: Context, model: nn.Module | None = None) -> TrainRequest:
        """Read a train message.

        Args:
            message: as the server sent it.
            context: of the node.
            model: the client's module, where there is one.
        """
        content = message.content
        key, arrays = only_record(content.array_records, "model")
        _, config = only_record(content.config_records, "config")
        rule = client_rule(config)
        reported, buffers = _reported_layout(arrays, config, model), config.get("fedexp.buffers")
        layout = reported or Layout.of(loaded(arrays), _names(buffers), read_ties(config))
        start = layout.flat(arrays)
        broadcast = _broadcast_state(content, rule, start, undecided=reported is not None)
        store = ClientStateFolder.of(
            state_root(context),
            str(config.get("fedexp.api", context.run_id)),
            client_name(context),
        )
        round = _whole(config, "server-round") or 0
        base, client_state = _initial_state(
            store, rule.init_client_state(start), round, _whole(config, "fedexp.accepted")
        )
        return cls(
            message,
            key,
            arrays,
            start,
            layout,
            rule,
            broadcast,
            round,
            base,
            client_state,
            store,
            _reply_info(config, reported),
        )

    def reply(
        self, arrays: ArrayRecord, metrics: Metrics, client_state: Tensors, extras: Tensors
    ) -> Message:
        """Return the reply, after the new client state is stored on disk.

        A state that is not finite is not stored: the server will refuse its update.
        """
        if client_state and all(bool(value.isfinite().all()) for value in client_state.values()):
            self.store.save(client_state, self.round, self.base)
        content = RecordDict({self.key: arrays, "metrics": MetricRecord(dict(metrics))})
        if extras:
            content[EXTRAS] = to_record(extras)
        if self.reply_info:
            content[REPLY_INFO] = ConfigRecord(dict(self.reply_info))
        return Message(content, reply_to=self.message)


def client_rule(config: ConfigRecord) -> ClientRule:
    """Return the client rule that the server names; SGD where it names none, as Flower's do."""
    name = str(config.get("fedexp.client", "sgd"))
    if name not in CLIENT_RULES:
        raise unknown_name("client rule", name, CLIENT_RULES)
    kind = CLIENT_RULES[name]
    return kind(**{field.name: _number(config, f"fedexp.{field.name}") for field in fields(kind)})


def rule_config(rule: ClientRule) -> dict[str, Any]:
    """Return what `client_rule` reads: the name of a rule, and its numbers."""
    (name,) = (name for name, kind in CLIENT_RULES.items() if kind is type(rule))
    numbers = {f"fedexp.{key}": value for key, value in vars(rule).items()}
    return {"fedexp.client": name, **numbers}


def read_ties(config: Mapping[str, Any], prefix: str = "fedexp.") -> dict[str, str] | None:
    """Return the tied parameters of a record; None where it has no entry for them."""
    names, sources = (config.get(f"{prefix}{key}") for key in ("tied", "tied-to"))
    if not isinstance(names, list) or not isinstance(sources, list):
        return None
    return {str(name): str(source) for name, source in zip(names, sources, strict=False)}


def layout_config(layout: Layout, prefix: str = "fedexp.") -> dict[str, Any]:
    """Return the buffers and ties of a layout as entries of a record; see `read_ties`."""
    return {
        f"{prefix}buffers": list(layout.averaged),
        f"{prefix}tied": list(layout.tied),
        f"{prefix}tied-to": list(layout.tied.values()),
    }


def _reported_layout(
    arrays: ArrayRecord, config: ConfigRecord, model: nn.Module | None
) -> Layout | None:
    """Return the layout of the client's model, where a strategy of this package left it undecided;
    None otherwise."""
    if model is None or read_ties(config) is not None or "fedexp.client" not in config:
        return None
    buffers, ties = named_parts(model)
    if "fedexp.buffers" in config:
        buffers = _names(config["fedexp.buffers"]) or []
    tied = {name: source for name, source in ties.items() if name in arrays and source in arrays}
    return Layout.of(loaded(arrays), [name for name in buffers if name in arrays], tied)


def _reply_info(config: ConfigRecord, reported: Layout | None) -> dict[str, Any]:
    """Return the rule and layout to report to a strategy of this package; {} for any other."""
    if "fedexp.client" not in config:
        return {}
    layout = {} if reported is None else layout_config(reported, "")
    return {"rule": str(config["fedexp.client"]), **layout}


def _initial_state(
    store: ClientStateFolder, fresh: Tensors, round: int, accepted: int | None
) -> tuple[int, Tensors]:
    """Return the state to start from, and its round: the last that the server accepted.

    Where the server does not name it, the newest one of an earlier round.
    """
    if not fresh:
        return 0, {}
    require(round >= 1, "the message has no round number; let the server send server-round")
    if accepted is None:
        accepted = max((r for r in store.rounds() if r < round), default=0)
    if not accepted:
        return 0, fresh
    stored = store.load(accepted)
    if stored is None:
        log.warning(
            "the state of round %d is not in %s: this client starts with a fresh state, and the "
            "server's control variate still includes the old one; give the node a persistent "
            "fedexp-state folder",
            accepted,
            store.folder,
        )
        return accepted, fresh
    fits = {k: v.shape for k, v in stored.items()} == {k: v.shape for k, v in fresh.items()}
    require(fits, f"{store.folder} belongs to another model; remove it or set fedexp-state")
    return accepted, stored


def _broadcast_state(
    content: RecordDict, rule: ClientRule, start: Tensor, undecided: bool
) -> dict[str, Tensor]:
    """Return the broadcast state of the rule, checked against the model.

    While the layout is `undecided`, the server may count another number of parameters; its state
    is still zero then.
    """
    sent = loaded(content.array_records.get(BROADCAST, ArrayRecord()))
    floats = {name: value for name, value in sent.items() if value.dtype.kind == "f"}
    broadcast: dict[str, Tensor] = {}
    for name, initial in rule.init_broadcast(start).items():
        value = floats.get(name)
        if value is not None and undecided and not value.any():
            broadcast[name] = torch.zeros_like(initial)
            continue
        if value is None or value.shape != initial.shape:
            raise UsageError(
                f"{type(rule).__name__} needs a vector {name!r} of {len(start)} numbers from the "
                "server; use a strategy of fedexp.flower there, of the same version"
            )
        broadcast[name] = to_vector(value, start.dtype)
    return broadcast


def _names(value: Any) -> list[str] | None:
    valid = value is None or isinstance(value, list)
    require(valid, f"the server sent {shown(value)!r} for a list of names")
    return None if value is None else [str(name) for name in value]


def _whole(config: ConfigRecord, key: str) -> int | None:
    value = config.get(key)
    if value is None or (isinstance(value, int) and value >= 0):
        return value
    raise UsageError(f"the server sent {key}={value!r}, which is not a whole number")


def _number(config: ConfigRecord, key: str) -> float:
    value = config.get(key)
    if isinstance(value, int | float):
        return float(value)
    raise UsageError(f"the server sent {key}={value!r}, which is not a number")
