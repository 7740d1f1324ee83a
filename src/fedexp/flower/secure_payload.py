"""`Payload`: an update as whole numbers in a known range, which is all that a secure sum can add.

Everything is a fraction of its bound: entries of the update of the clip, extras of their own bound.
Fractions are rounded to multiples of 2 / levels by the client, and the squared norm is that of the
rounded update. So the server's sums are exact, the same in every repetition, and the mean squared
norm is never below the squared norm of the mean.

`SecureAggregation`: what a server asks of a round whose sums only it may see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from fedexp.client import ClientRule
from fedexp.errors import UsageError, require
from fedexp.flower.layout import Layout
from fedexp.flower.replies import Weighting, extras_of
from fedexp.flower.request import layout_terms

Vector = NDArray[np.float64]
Vectors = Mapping[str, Vector]

MODULUS = 2**32  # of Flower's masks
FEWEST_LEVELS = 4.0  # times the root of the dimension: what rounding adds to a norm stays small


class Sums(NamedTuple):
    """What the server learns of a round."""

    update: Vector
    sq_norm: float
    clipped: int
    extras: dict[str, Vector]


def levels_for(clients: int) -> int:
    """How many steps the range of an entry has, so that the sum of all clients fits the modulus.

    A power of two: then rounding to it is exact in float64, and Flower's own rounding, which draws
    from an unseeded generator, has nothing left to round.

    >>> levels_for(10) == 2**28, levels_for(1000) == 2**22
    (True, True)
    """
    require(clients >= 1, "a secure sum needs clients")
    return 1 << ((MODULUS - 1) // clients).bit_length() - 1


@dataclass(frozen=True)
class Payload:
    """How the update of a client and what goes with it become one vector, and back.

    Args:
        clip: bound C > 0 of the norm of an update; longer ones are scaled down to it.
        levels: steps in the range of an entry; see `levels_for`.
        dim: entries of the update.
        extras: sizes of the further vectors, by name.
        extras_bound: bound of the absolute value of their entries.

    >>> payload = Payload(clip=10.0, levels=2**28, dim=2)
    >>> clients = [payload.pack(np.array([3.0, 4.0])), payload.pack(np.array([60.0, 80.0]))]
    >>> sums = payload.unpack(np.mean(clients, axis=0), clients=2)
    >>> sums.update.round(6).tolist(), round(sums.sq_norm, 5), sums.clipped
    ([9.0, 12.0], 125.0, 1)
    """

    clip: float
    levels: int
    dim: int
    extras: tuple[tuple[str, int], ...] = ()
    extras_bound: float | None = None

    def __post_init__(self) -> None:
        require(self.clip > 0 and np.isfinite(self.clip), f"clip must be positive, not {self.clip}")
        require(
            self.levels >= FEWEST_LEVELS * self.dim**0.5,
            f"{self.levels} levels are too few for {self.dim} parameters; "
            "take fewer clients a round",
        )
        require(
            not self.extras or bool(self.extras_bound and self.extras_bound > 0),
            f"{' and '.join(name for name, _ in self.extras)} would have to be summed too: "
            "set extras_bound, a bound on the absolute value of their entries",
        )

    @property
    def size(self) -> int:
        """How many numbers travel."""
        return self.dim + sum(size for _, size in self.extras) + 3

    def pack(self, update: Vector, extras: Vectors | None = None) -> Vector:
        """A client's vector, with all entries in [-1, 1].

        Refuses what is not finite, and extras that the bound would cut. Its messages have no
        number of the client's in them: they reach the server.
        """
        norm = float(np.linalg.norm(update))
        require(np.isfinite(norm), "the update has values that are not finite")
        shrink = min(1.0, self.clip / norm) if norm else 1.0
        whole = self._whole(update * (shrink / self.clip))
        parts = [whole, *(self._extra(name, (extras or {})[name]) for name, _ in self.extras)]
        coarse, fine = self._digits(np.square(whole * self._unit).sum())
        numbers = np.array([coarse, fine, float(shrink < 1)])
        return np.concatenate([*parts, numbers]) * self._unit

    def unpack(self, mean: Vector, clients: int) -> Sums:
        """The sums over `clients` clients out of the mean of their vectors."""
        require(mean.shape == (self.size,), "the sum has another size than the model")
        whole = self._whole(mean * clients)
        ends = np.cumsum([self.dim, *(size for _, size in self.extras)])
        update, *extras, (coarse, fine, clipped) = np.split(whole, ends)
        bound = self.extras_bound or 0.0
        return Sums(
            update * (self._unit * self.clip),
            float(2 * self.clip**2 * self._unit * (coarse + fine / self.levels)),
            int(clipped),
            {
                name: part * (self._unit * bound)
                for (name, _), part in zip(self.extras, extras, strict=True)
            },
        )

    @property
    def rounding(self) -> float:
        """What rounding adds to a squared norm: a twelfth of the unit squared for each entry."""
        return self.dim * (self.clip * self._unit) ** 2 / 12

    @property
    def _unit(self) -> float:
        return 2.0 / self.levels

    def _whole(self, fraction: Vector) -> Vector:
        return np.rint(fraction * (self.levels / 2))

    def _digits(self, sq_norm: float) -> tuple[float, float]:
        """Half the squared norm (which is <= 2 where C is 1) in two whole numbers.

        One would do for norms near the clip; much shorter updates need the second.
        """
        exact = sq_norm / 2 / self._unit
        coarse = np.rint(exact)
        return float(coarse), float(np.rint((exact - coarse) * self.levels))

    def _extra(self, name: str, values: Vector) -> Vector:
        bound = self.extras_bound or 0.0
        if not np.abs(values).max(initial=0.0) <= bound:  # not >: a NaN is refused as well
            raise UsageError(f"an entry of {name} is beyond extras_bound={bound}; raise the bound")
        return self._whole(values / bound)


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
