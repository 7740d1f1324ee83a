"""`SecureAggregation`: what a server asks of a round whose sums only it may see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from fedexp.client import ClientRule
from fedexp.errors import require
from fedexp.flower.layout import Layout
from fedexp.flower.replies import Weighting, extras_of
from fedexp.flower.request import layout_terms
from fedexp.flower.secure_payload import Payload, levels_for

TERMS = "fedexp.secure"  # the record of a message that tells clients how to pack
NEAR_ALL = 32  # clients a round up to which everyone shares keys with everyone

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SecureAggregation:
    """Sum the updates by Flower's SecAgg+: the server learns sums, never one client's update.

    Give it to a strategy, `FedExP(secure=SecureAggregation(clip=10.0))`, and put `secure_mod` into
    the client's app, `ClientApp(mods=[secure_mod])`. docs/secure-aggregation.md says what that
    protects and what not, and how to choose the values.

    Args:
        clip: bound of the norm of an update, > 0; a client scales longer ones down to it.
        extras_bound: bound of the entries of what else is summed, SCAFFOLD's control variates and
            changes of BatchNorm's statistics; a client with a larger one drops out of the round.
        shares: with how many clients, itself included, each shares its keys: an odd number of at
            least 3; None for all up to 32 clients a round, else 31.
        threshold: the part of the shares that unmask a sum, in (0.5, 1). Lower bears more
            drop-outs, higher more clients that collude with the server.
        fewest: clients that a sum must have, at least 3; sums over fewer are never unmasked.

    >>> secure = SecureAggregation(clip=1.0)
    >>> secure.shares_of(10), secure.threshold_of(10), secure.shares_of(100)
    (10, 7, 31)
    """

    clip: float
    extras_bound: float | None = None
    shares: int | None = None
    threshold: float = 2 / 3
    fewest: int = 3

    def __post_init__(self) -> None:
        import fedexp.flower.secure_legacy  # noqa: F401  (refuse now what Flower cannot do)

        for name, value in {"clip": self.clip, "extras_bound": self.extras_bound}.items():
            sound = value is None or (math.isfinite(value) and value > 0)
            require(sound, f"{name} must be positive and finite, not {value}")
        require(
            self.shares is None or (self.shares >= 3 and self.shares % 2 == 1),
            f"shares must be an odd number of at least 3, not {self.shares}",
        )
        require(0.5 < self.threshold < 1, f"threshold lies in (0.5, 1), not {self.threshold}")
        require(self.fewest >= 3, f"fewest must be at least 3, not {self.fewest}")

    def shares_of(self, clients: int) -> int:
        """How many shares a key has in a round of so many clients."""
        some = self.shares or (clients if clients <= NEAR_ALL else NEAR_ALL - 1)
        return min(some, clients)

    def threshold_of(self, shares: int) -> int:
        """How many of them are needed to recover it: more than half, and never all."""
        wanted = math.ceil(self.threshold * shares - 1e-9)
        return min(max(2, wanted), shares - 1)

    def check(self, rule: ClientRule, layout: Layout, weighting: Weighting, clients: int) -> None:
        """Refuse what a secure sum cannot do, before the first round."""
        require(
            weighting == "uniform",
            "secure aggregation weighs all clients the same, so that no number of examples is "
            "told; use weighting='uniform'",
        )
        self.payload(rule, layout, clients)

    def payload(self, rule: ClientRule, layout: Layout, clients: int) -> Payload:
        """How so many clients pack their updates."""
        require(
            clients >= self.fewest,
            f"secure aggregation needs at least {self.fewest} clients a round, but it has "
            f"{clients}; raise fraction_train or min_train_nodes",
        )
        return Payload(
            self.clip,
            levels_for(clients),
            layout.dim,
            _extra_sizes(rule, layout),
            self.extras_bound,
        )


def terms_of(payload: Payload, layout: Layout, key: str) -> ConfigRecord:
    """What a client has to know to pack, as a record of its message."""
    terms: dict[str, Any] = {
        "clip": payload.clip,
        "model": key,
        **layout_terms(layout, ""),
        "extras": [name for name, _ in payload.extras],
        "sizes": [size for _, size in payload.extras],
    }
    if payload.extras_bound is not None:
        terms["extras-bound"] = payload.extras_bound
    return ConfigRecord(terms)


def payload_of(terms: ConfigRecord, levels: int, dim: int) -> Payload:
    """The client's side of `terms_of`."""
    told: dict[str, Any] = dict(terms)
    extras = tuple(zip(told["extras"], told["sizes"], strict=True))
    return Payload(told["clip"], levels, dim, extras, told.get("extras-bound"))


def _extra_sizes(rule: ClientRule, layout: Layout) -> Sizes:
    """What is summed beside the update: what the client rule adds, and the buffers."""
    sizes = dict.fromkeys(extras_of(rule), layout.dim)
    if layout.averaged:
        sizes["buffers"] = sum(slot.size for slot in layout.slots if slot.kind == "averaged")
    return tuple(sorted(sizes.items()))
