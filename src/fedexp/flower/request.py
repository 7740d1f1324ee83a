"""`Request`: what a server asks of a client in a round, read from its message."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedexp.client import SGD, ClientRule, Prox, Scaffold, Tensors
from fedexp.errors import UsageError, require, shown, unknown_name
from fedexp.flower.client_state import ClientStore, client_name, state_root
from fedexp.flower.layout import Layout, loaded, named_parts

SHARED, EXTRAS, ABOUT = "fedexp.shared", "fedexp.extras", "fedexp.about"
Metrics = Mapping[str, Any]
Kind = TypeVar("Kind", ArrayRecord, ConfigRecord)
log = logging.getLogger("flwr")


@dataclass(frozen=True, eq=False)
class Request:
    """A train message, taken apart.

    Attributes:
        message: the message to reply to.
        key: under which the model travels, in the message and in the reply.
        arrays: the model that the round begins from.
        start: its parameters as one vector.
        layout: how its arrays become vectors, as the server sees it.
        rule: the client rule that the server asks for.
        shared: what the server keeps for that rule, as flat vectors.
        round: the round, counted from 1.
        base: the round whose state this client begins with; 0 where it begins afresh.
        mine: that state.
        store: where the client keeps its states.
        about: what the reply says of itself: the rule it was trained by, and, where the server
            does not say, which arrays of the model are buffers and which parameters are tied.
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
    store: ClientStore
    about: Mapping[str, Any]

    @classmethod
    def of(cls, message: Message, context: Context, model: nn.Module | None = None) -> Request:
        """Read a train message.

        Args:
            message: as the server sent it.
            context: the node's.
            model: the module whose arrays the server sends, where there is one.
        """
        content = message.content
        key, arrays = single_record(content, ArrayRecord, "model")
        _, config = single_record(content, ConfigRecord, "config")
        rule = asked_rule(config)
        reported, buffers = _reported_layout(arrays, config, model), config.get("fedexp.buffers")
        layout = reported or Layout.of(loaded(arrays), _names(buffers), ties_in(config))
        start = layout.flat(arrays)
        broadcast = _vectors(content, rule, start, is_open=reported is not None)
        about = _about(config, reported)
        store = ClientStore.of(
            state_root(context),
            str(config.get("fedexp.study", context.run_id)),
            client_name(context),
        )
        round = _whole(config, "server-round") or 0
        base, client_state = _begin(
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
            about,
        )

    def reply(
        self, arrays: ArrayRecord, metrics: Metrics, kept: Tensors, extras: Tensors
    ) -> Message:
        """The reply, after what the client keeps is safely on its disk.

        A state that is not finite belongs to an update that the server will refuse.
        """
        if kept and all(bool(value.isfinite().all()) for value in kept.values()):
            self.store.save(kept, self.round, self.base)
        content = RecordDict({self.key: arrays, "metrics": MetricRecord(dict(metrics))})
        if extras:
            named = {name: Array(value.numpy()) for name, value in extras.items()}
            content[EXTRAS] = ArrayRecord(named)
        if self.about:
            content[ABOUT] = ConfigRecord(dict(self.about))
        return Message(content, reply_to=self.message)


def asked_rule(config: ConfigRecord) -> ClientRule:
    """The client rule that a server names; plain SGD where it names none, as Flower's own do."""
    known = {
        "sgd": SGD,
        "prox": lambda: Prox(float(_number(config, "fedexp.mu"))),
        "scaffold": Scaffold,
    }
    name = str(config.get("fedexp.client", "sgd"))
    if name not in known:
        raise unknown_name("client rule", name, known)
    return known[name]()


def ties_in(config: Mapping[str, Any], prefix: str = "fedexp.") -> dict[str, str] | None:
    """Return the tied parameters that a record names; None where it says nothing of them."""
    names, sources = (config.get(f"{prefix}{key}") for key in ("tied", "tied-to"))
    if not isinstance(names, list) or not isinstance(sources, list):
        return None
    return {str(name): str(source) for name, source in zip(names, sources, strict=False)}


def layout_terms(layout: Layout, prefix: str = "fedexp.") -> dict[str, Any]:
    """Return a layout as records carry it; `ties_in` reads the ties again."""
    return {
        f"{prefix}buffers": list(layout.averaged),
        f"{prefix}tied": list(layout.tied),
        f"{prefix}tied-to": list(layout.tied.values()),
    }


def _reported_layout(
    arrays: ArrayRecord, config: ConfigRecord, model: nn.Module | None
) -> Layout | None:
    """Return the layout by the client's own model, where a strategy of this package leaves open
    which arrays are buffers and which parameters are tied; None where it does not."""
    if model is None or ties_in(config) is not None or "fedexp.client" not in config:
        return None
    buffers, ties = named_parts(model)
    if "fedexp.buffers" in config:
        buffers = _names(config["fedexp.buffers"]) or []
    known = {name: source for name, source in ties.items() if name in arrays and source in arrays}
    return Layout.of(loaded(arrays), [name for name in buffers if name in arrays], known)


def _about(config: ConfigRecord, reported: Layout | None) -> dict[str, Any]:
    """Return what a reply says of itself to a strategy of this package; nothing to others."""
    if "fedexp.client" not in config:
        return {}
    parts = {} if reported is None else layout_terms(reported, "")
    return {"rule": str(config["fedexp.client"]), **parts}


def _begin(
    store: ClientStore, fresh: Tensors, round: int, accepted: int | None
) -> tuple[int, Tensors]:
    """The state to begin with: of the last round that the server accepted from this client.

    A server that does not say gets the newest of an earlier round.
    """
    if not fresh:
        return 0, {}
    require(round >= 1, "the server did not say which round it is; let it send server-round")
    if accepted is None:
        accepted = max((r for r in store.rounds() if r < round), default=0)
    if not accepted:
        return 0, fresh
    found = store.load(accepted)
    if found is None:
        log.warning(
            "the state of round %d is not in %s: this client begins afresh, and the server's "
            "control variate keeps what it had of it; give the node a fedexp-state folder that "
            "outlives it",
            accepted,
            store.folder,
        )
        return accepted, fresh
    fits = {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in fresh.items()}
    require(fits, f"{store.folder} belongs to another model; remove it or set fedexp-state")
    return accepted, found


def _vectors(
    content: RecordDict, rule: ClientRule, start: Tensor, is_open: bool
) -> dict[str, Tensor]:
    """What the server keeps for the rule, checked against the model.

    Before clients have reported how the model is laid out (`is_open`), the server may reckon with
    another number of parameters; what it keeps is still zero then.
    """
    wanted = rule.init_broadcast(start)
    sent = content.array_records.get(SHARED, ArrayRecord())
    floats = {name: value for name, value in loaded(sent).items() if value.dtype.kind == "f"}
    broadcast = {  # torch knows neither numpy's longest fractions nor bytes in another order
        name: torch.from_numpy(value.astype(np.float64)).to(start.dtype)
        for name, value in floats.items()
    }
    for name, value in wanted.items():
        if is_open and name in broadcast and not broadcast[name].any():
            broadcast[name] = torch.zeros_like(value)
        require(
            name in broadcast and broadcast[name].shape == value.shape,
            f"{type(rule).__name__} needs a vector {name!r} of {len(start)} numbers from the "
            "server; use a strategy of fedexp.flower there, of the same version",
        )
    return {name: broadcast[name] for name in wanted}


def single_record(content: RecordDict, kind: type[Kind], what: str) -> tuple[str, Kind]:
    """The one record of a kind that is not ours, whatever the server calls it."""
    found = [
        (key, value)
        for key, value in content.items()
        if isinstance(value, kind) and not key.startswith("fedexp.")
    ]
    require(len(found) == 1, f"the message has {len(found)} records with a {what}, not one")
    return found[0]


def _names(value: Any) -> list[str] | None:
    sound = value is None or isinstance(value, list)
    require(sound, f"the server sent {shown(value)!r} for a list of names")
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
