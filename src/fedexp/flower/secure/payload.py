"""Secure aggregation: its settings, and the encoding of an update for a secure sum.

A secure sum adds integers modulo 2^32. `Payload` encodes an update as a vector of fractions of a
known bound: entries of the update as fractions of the clip, extras of their own bound. The client
rounds them to multiples of 2 / levels, and the squared norm is that of the rounded update. So the
server's sums are exact and reproducible, and the mean squared norm is never below the squared norm
of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from fedexp.client import ClientRule, zero_extras
from fedexp.errors import UsageError, is_number, require, whole_number
from fedexp.flower.layout import Layout
from fedexp.flower.request import layout_config

Vector = NDArray[np.float64]
Vectors = Mapping[str, Vector]

MODULUS = 2**32  # of Flower's masks
FEWEST_LEVELS = 4.0  # times the root of the dimension, so that rounding adds little to a norm
PAYLOAD = "fedexp.secure"  # the config record of a message that describes the payload
NOT_UNIFORM = (
    "secure aggregation weights all clients equally, so that no number of examples is revealed; "
    "use weighting='uniform'"
)
ALL_TO_ALL = 32  # clients per round up to which each shares keys with all


@dataclass(frozen=True)
class SecureAggregation:
    """Sum the updates by Flower's SecAgg+: the server learns sums, never one client's update.

    Give it to a strategy, `FedExP(secure=SecureAggregation(clip=10.0))`, and `secure_mod` to the
    ClientApp, `ClientApp(mods=[secure_mod])`. docs/secure-aggregation.md describes what it protects
    and what not, and how to choose the values.

    Args:
        clip: bound of the norm of an update, > 0; a client scales longer ones down to it. Of the
            first round, and the largest one, where the algorithm has a `bound`.
        extras_bound: bound of the entries of what else is summed, SCAFFOLD's control variates and
            changes of BatchNorm's statistics; a client with a larger one drops out of the round.
        shares: number of clients, itself included, with which each shares its keys: odd and at
            least 3; None for all up to 32 clients per round, else 31.
        threshold: the fraction of the shares that unmasks a sum, in (0.5, 1). A lower one tolerates
            more drop-outs, a higher one more clients that collude with the server.
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
        import fedexp.flower.secure.round  # noqa: F401  (raises if this Flower lacks SecAgg+)

        for name, value in {"clip": self.clip, "extras_bound": self.extras_bound}.items():
            optional = name == "extras_bound" and value is None
            valid = optional or (is_number(value) and value is not None and 0 < value <= 1e30)
            require(valid, f"{name} must be positive and at most 1e30, not {value!r}")
        if self.shares is not None:
            odd = whole_number("shares", self.shares, least=3) % 2 == 1
            require(odd, f"shares must be an odd number of at least 3, not {self.shares}")
        valid = is_number(self.threshold) and 0.5 < self.threshold < 1
        require(valid, f"threshold must be in (0.5, 1), not {self.threshold!r}")
        whole_number("fewest", self.fewest, least=3)

    def shares_of(self, clients: int) -> int:
        """Return how many shares a key has in a round of so many clients."""
        some = self.shares or (clients if clients <= ALL_TO_ALL else ALL_TO_ALL - 1)
        return min(some, clients)

    def threshold_of(self, shares: int) -> int:
        """Return how many shares recover a key: more than half, and never all."""
        wanted = math.ceil(self.threshold * shares - 1e-9)
        return min(max(2, wanted), shares - 1)

    def payload(
        self, rule: ClientRule, layout: Layout, clients: int, bound: float | None = None
    ) -> Payload:
        """Return the encoding of updates for a round of so many clients.

        Refuses what a secure sum does not support. `bound` is the algorithm's.
        """
        require(
            clients >= self.fewest,
            f"secure aggregation needs at least {self.fewest} clients per round, but it has "
            f"{clients}; raise fraction_train or min_train_nodes",
        )
        sizes = dict.fromkeys(zero_extras(rule, torch.empty(0)), layout.dim)
        if layout.averaged:
            sizes["buffers"] = sum(slot.size for slot in layout.slots if slot.kind == "averaged")
        extras = tuple(sorted(sizes.items()))
        levels = levels_for(clients)
        return Payload(self.clip, levels, layout.dim, extras, self.extras_bound, bound or 1.0)


class Sums(NamedTuple):
    """The sums that the server learns from a round.

    `longer` counts the clients whose update is longer than the clip over `bound`.
    """

    update: Vector
    sq_norm: float
    longer: int
    extras: dict[str, Vector]


def levels_for(clients: int) -> int:
    """Return the number of quantisation levels with which the sum of all clients fits the modulus.

    A power of two: then rounding to it is exact in float64, and Flower's own rounding, which draws
    from an unseeded generator, has nothing left to round.

    >>> levels_for(10) == 2**28, levels_for(1000) == 2**22
    (True, True)
    """
    return 1 << ((MODULUS - 1) // clients).bit_length() - 1


@dataclass(frozen=True)
class Payload:
    """The encoding of a client's update and extras as one vector.

    Args:
        clip: bound C > 0 of the norm of an update; longer ones are scaled down to it.
        levels: quantisation levels of an entry; see `levels_for`.
        dim: d, entries of the update.
        extras: names and sizes of the further vectors.
        extras_bound: bound of the absolute value of their entries.
        bound: of the algorithm, in medians; the clip is so many. 1 without.

    >>> payload = Payload(clip=10.0, levels=2**28, dim=2)
    >>> clients = [payload.pack(np.array([3.0, 4.0])), payload.pack(np.array([60.0, 80.0]))]
    >>> sums = payload.unpack(np.mean(clients, axis=0), clients=2)
    >>> sums.update.round(6).tolist(), round(sums.sq_norm, 5), sums.longer
    ([9.0, 12.0], 125.0, 1)
    """

    clip: float
    levels: int
    dim: int
    extras: tuple[tuple[str, int], ...] = ()
    extras_bound: float | None = None
    bound: float = 1.0

    def __post_init__(self) -> None:
        require(self.clip > 0 and np.isfinite(self.clip), f"clip must be positive, not {self.clip}")
        require(
            self.levels >= FEWEST_LEVELS * self.dim**0.5,
            f"{self.levels} levels are too few for {self.dim} parameters; "
            "take fewer clients per round",
        )
        require(
            not self.extras or bool(self.extras_bound and self.extras_bound > 0),
            f"{' and '.join(name for name, _ in self.extras)} would have to be summed too: "
            "set extras_bound, a bound on the absolute value of their entries",
        )

    @property
    def size(self) -> int:
        """Return the length of the encoded vector."""
        return self.dim + sum(size for _, size in self.extras) + 3

    def pack(self, update: Vector, extras: Vectors | None = None) -> Vector:
        """Return a client's encoded vector, with all entries in [-1, 1].

        Refuses values that are not finite, and extras beyond their bound. The error messages
        contain no values of the client, because they reach the server.
        """
        norm = float(np.linalg.norm(update))
        require(np.isfinite(norm), "the update has values that are not finite")
        shrink = min(1.0, self.clip / norm) if norm else 1.0
        rounded = self._quantize(update * (shrink / self.clip))
        parts = [rounded, *(self._extra(name, (extras or {})[name]) for name, _ in self.extras)]
        coarse, fine = self._two_digits(np.square(rounded * self._unit).sum())
        numbers = np.array([coarse, fine, float(norm > self.clip / self.bound)])
        return np.concatenate([*parts, numbers]) * self._unit

    def unpack(self, mean: Vector, clients: int) -> Sums:
        """Return the sums over `clients` clients from the mean of their vectors."""
        require(mean.shape == (self.size,), "the sum has another size than the model")
        total = self._quantize(mean * clients)
        ends = np.cumsum([self.dim, *(size for _, size in self.extras)])
        update, *extras, (coarse, fine, longer) = np.split(total, ends)
        bound = self.extras_bound or 0.0
        return Sums(
            update * (self._unit * self.clip),
            float(2 * self.clip**2 * self._unit * (coarse + fine / self.levels)),
            int(longer),
            {
                name: part * (self._unit * bound)
                for (name, _), part in zip(self.extras, extras, strict=True)
            },
        )

    @property
    def rounding(self) -> float:
        """Return what rounding adds to a squared norm: unit² / 12 per entry."""
        return self.dim * (self.clip * self._unit) ** 2 / 12

    @property
    def _unit(self) -> float:
        return 2.0 / self.levels

    def _quantize(self, fraction: Vector) -> Vector:
        return np.rint(fraction * (self.levels / 2))

    def _two_digits(self, sq_norm: float) -> tuple[float, float]:
        """Return half the squared norm (at most 2 for C = 1) as two integers, coarse and fine.

        The coarse one is enough for norms near the clip; much shorter updates need the fine one.
        """
        exact = sq_norm / 2 / self._unit
        coarse = np.rint(exact)
        return float(coarse), float(np.rint((exact - coarse) * self.levels))

    def _extra(self, name: str, values: Vector) -> Vector:
        bound = self.extras_bound or 0.0
        if not np.abs(values).max(initial=0.0) <= bound:  # not >, so that NaN is refused too
            raise UsageError(f"an entry of {name} is beyond extras_bound={bound}; raise the bound")
        return self._quantize(values / bound)


def payload_config(payload: Payload, layout: Layout, key: str) -> ConfigRecord:
    """Return the record that describes a payload to clients; `key` is that of the model."""
    config: dict[str, Any] = {
        "clip": payload.clip,
        "bound": payload.bound,
        "model": key,
        **layout_config(layout, ""),
        "extras": [name for name, _ in payload.extras],
        "sizes": [size for _, size in payload.extras],
    }
    if payload.extras_bound is not None:
        config["extras-bound"] = payload.extras_bound
    return ConfigRecord(config)


def read_payload(record: ConfigRecord, levels: int, dim: int) -> Payload:
    """Return the payload that a record of `payload_config` describes."""
    config: dict[str, Any] = dict(record)
    extras = tuple(zip(config["extras"], config["sizes"], strict=True))
    limits = config["clip"], config.get("extras-bound"), config["bound"]
    return Payload(limits[0], levels, dim, extras, *limits[1:])
