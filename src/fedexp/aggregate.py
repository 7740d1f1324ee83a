"""`Aggregate`: the sums that clients send to the server; everything on the network is a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.errors import require
from fedexp.kernels.launch import has_triton
from fedexp.precision import widest

SCALARS = ("weight", "sq_norm", "count", "dropped")
WEIGHT_OF = "weight of "  # begins the name of an extra that is the weight of another
CACHED_COLUMNS = 2**16  # columns converted to float64 at a time: a block that fits a CPU's cache
LONG_ROW = 2**17  # numbers of a vector for which kernels pay on a GPU


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The sums a server needs from a round, and nothing else.

    A commutative monoid under `+`, exact up to floating-point rounding::

        zero + a == a        a + b == b + a        (a + b) + c == a + (b + c)

    so streaming over clients, sharding a cohort over processes and secure aggregation are all the
    same operation, and the server never holds more than one update.

    Attributes:
        weight: sum of the client weights p_i.
        update: sum of p_i Δ_i, a vector in float32 or wider; Δ_i = w - w_i as in the paper (eq. 3).
        sq_norm: sum of p_i ||Δ_i||², over the whole vector, in float64 where the device has it.
        count: number of clients in the sums.
        dropped: number of clients left out because their update was not finite.
        extras: named sums that a client rule or a model adds, weighted by p_i as well. Where one is
            called "weight of x", it is the weight over which the mean of x is taken.

    >>> a = Aggregate.of([[3.0, 4.0], [1.0, 0.0]])
    >>> a.mean.tolist(), a.mean_sq_norm.item()
    ([2.0, 2.0], 13.0)
    >>> a + Aggregate.zero(2) == a
    True
    """

    weight: Tensor
    update: Tensor
    sq_norm: Tensor
    count: Tensor
    dropped: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        deltas: Any,
        weights: Any = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Aggregate:
        """Sum the updates of M clients.

        A client with a non-finite entry anywhere, or whose squared norm overflows, adds nothing to
        the sums and one to `dropped`: one broken client must not break the model.

        Args:
            deltas: M updates, shape [M, d].
            weights: M non-negative weights; uniform when None. The same weights enter the mean
                and the mean squared norm, always.
            extras: further values to sum, each of shape [M, ...].
        """
        deltas = _matrix(deltas)
        if weights is not None:
            dtype = widest(deltas.device)
            weights = torch.as_tensor(weights, dtype=dtype, device=deltas.device)
            weights = _checked_weights(weights, len(deltas))
        return cls.of_checked(deltas, weights, extras or {})

    @classmethod
    def of_checked(
        cls,
        deltas: Tensor,
        weights: Tensor | None,
        extras: Mapping[str, Tensor],
        computed: FiniteNorms | None = None,
    ) -> Aggregate:
        """Sum the updates with weights that are known to be valid, of the type `widest`.

        Nothing is checked, so that a GPU need not wait for the host. `computed` are the results of
        `finite_norms` where the caller has them.
        """
        sq_norms, finite = computed or finite_norms(deltas, extras)
        deltas = _accumulable(deltas)
        extras = {name: _accumulable(value) for name, value in extras.items()}
        dtype = widest(deltas.device)
        weights = finite.to(dtype) if weights is None else finite * weights
        return cls(
            weight=weights.sum(),
            update=_weighted_sum(weights, finite, deltas),
            sq_norm=torch.where(finite, weights * sq_norms, 0.0).sum(),
            count=finite.sum(dtype=dtype),
            dropped=(~finite).sum(dtype=dtype),
            extras={name: _weighted_sum(weights, finite, v) for name, v in extras.items()},
        )

    @classmethod
    def zero(
        cls,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Aggregate:
        """Return the neutral element: no clients. A missing extra counts as zero."""
        nothing = torch.zeros((), dtype=widest(torch.device(device)), device=device)
        update = _accumulable(torch.zeros(dim, dtype=dtype, device=device))
        return cls(nothing, update, nothing, nothing, nothing)

    def __add__(self, other: Aggregate) -> Aggregate:
        require(
            self.update.shape == other.update.shape,
            f"cannot add updates of {len(self.update)} and {len(other.update)} parameters",
        )
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*SCALARS, "update")}
        extras = {**self.extras, **other.extras}
        for name in self.extras.keys() & other.extras.keys():
            extras[name] = self.extras[name] + other.extras[name]
        return Aggregate(**sums, extras=extras)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Aggregate):
            return NotImplemented
        same_layout = self.extras.keys() == other.extras.keys()
        return same_layout and torch.equal(self.pack(), other.pack())

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def mean(self) -> Tensor:
        """The mean update sum p_i Δ_i / sum p_i; zero when there are no clients."""
        return self._over_weight(self.update)

    @property
    def mean_sq_norm(self) -> Tensor:
        """The mean squared norm sum p_i ||Δ_i||² / sum p_i, a float64 scalar."""
        return self._over_weight(self.sq_norm)

    @property
    def sq_norm_of_mean(self) -> Tensor:
        """||mean||² over the whole vector, a float64 scalar."""
        return norms(self.mean[None])[0].square()

    def mean_extra(self, name: str) -> Tensor:
        """Return the mean of a named extra, over its own weight where the sums have one."""
        weight = self.extras.get(WEIGHT_OF + name, self.weight)
        return _ratio(self.extras[name], weight)

    def pack(self) -> Tensor:
        """Return all sums in one flat buffer of float64 (`widest`), for a single all-reduce.

        The sum of packed buffers is the packed sum (for aggregates with the same extras).
        """
        scalars = torch.stack([getattr(self, name) for name in SCALARS])
        vectors = [self.update, *(self.extras[name].flatten() for name in sorted(self.extras))]
        return torch.cat([scalars, *(vector.to(scalars.dtype) for vector in vectors)])

    def unpack(self, buffer: Tensor) -> Aggregate:
        """Return the aggregate in `buffer`, with the layout of this one; the inverse of `pack`."""
        names = sorted(self.extras)
        parts = [len(SCALARS), self.update.numel(), *(self.extras[n].numel() for n in names)]
        require(
            buffer.shape == (sum(parts),),
            f"the buffer has shape {tuple(buffer.shape)} where [{sum(parts)}] was expected; "
            "unpack with an aggregate of the same model and extras",
        )
        scalars, update, *extras = buffer.split(parts)
        scalar = dict(zip(SCALARS, scalars.unbind(), strict=True))
        shaped = {
            name: value.view_as(self.extras[name]).to(self.extras[name].dtype)
            for name, value in zip(names, extras, strict=True)
        }
        return replace(self, **scalar, update=update.to(self.update.dtype), extras=shaped)

    def _over_weight(self, total: Tensor) -> Tensor:
        return _ratio(total, self.weight)


class FiniteNorms(NamedTuple):
    """The squared norms of M updates, [M], and whether a client's values are all finite, [M]."""

    sq_norms: Tensor
    finite: Tensor


def finite_norms(deltas: Tensor, extras: Mapping[str, Tensor]) -> FiniteNorms:
    """Return the squared norms, and which of M clients `Aggregate.of` includes."""
    sq_norms = norms(_accumulable(deltas)).square()
    rows = (_all_finite(value.flatten(1)) for value in extras.values())
    return FiniteNorms(sq_norms, reduce(torch.logical_and, rows, sq_norms.isfinite()))


def usable(deltas: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """Return which of M clients `Aggregate.of` includes: all finite, norm included; shape [M]."""
    return finite_norms(deltas, extras).finite


def norms(rows: Tensor) -> Tensor:
    """Return the norms of the rows of [M, d] in float64 where the device has it, shape [M]."""
    if _suits_kernels(rows):
        from fedexp.kernels import rows_triton

        return rows_triton.sq_norms(rows).sqrt()
    dtype = widest(rows.device)
    if rows.device.type != "cpu" or rows.dtype == dtype:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    # on a CPU, float64 copies of blocks that fit its cache are four times as fast as dtype=float64
    if rows.shape[1] > CACHED_COLUMNS and len(rows) > 1:
        return torch.cat([norms(row[None]) for row in rows])
    parts = (part.double() for part in rows.split(CACHED_COLUMNS, dim=1))
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts]), dim=0
    )


def _ratio(total: Tensor, weight: Tensor) -> Tensor:
    """Return a mean from its sum; zero where nothing has a weight."""
    return total / torch.where(weight > 0, weight, torch.inf)


def _all_finite(rows: Tensor) -> Tensor:
    """Return which rows of [M, d] have finite values only, [M]."""
    if _suits_kernels(rows):  # no square of a float32 overflows in float64
        return norms(rows).isfinite()
    return rows.isfinite().all(dim=1)


def _suits_kernels(rows: Tensor) -> bool:
    """Return whether the kernels for one vector per client pay: long float32 vectors on a GPU."""
    return (
        rows.is_cuda
        and rows.dtype == torch.float32
        and rows.shape[1] >= LONG_ROW
        and rows.stride(1) == 1
        and has_triton()
    )


def _matrix(deltas: Any) -> Tensor:
    """Return M updates, given as a matrix or as a list of vectors, as a tensor [M, d]."""
    if isinstance(deltas, list | tuple):
        deltas = torch.stack([torch.as_tensor(delta) for delta in deltas])
    matrix = torch.as_tensor(deltas)
    require(matrix.ndim == 2, f"deltas must have shape [M, d], not {tuple(matrix.shape)}")
    return matrix


def _accumulable(value: Tensor) -> Tensor:
    """Return values in float32 or wider: half precision and integers are converted to float32."""
    return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float32)


def _checked_weights(weights: Tensor, clients: int) -> Tensor:
    require(weights.shape == (clients,), f"need one weight for each of {clients} clients")
    in_range = (weights >= 1e-30) & (weights <= 1e30)  # so that float32 sums can hold them
    require(
        bool((in_range | (weights == 0)).all()),
        "client weights must be 0 or between 1e-30 and 1e30",
    )
    return weights


def _weighted_sum(weights: Tensor, finite: Tensor, values: Tensor) -> Tensor:
    rows = values.flatten(1)
    if _suits_kernels(rows):
        from fedexp.kernels import rows_triton

        return rows_triton.weighted_sum(weights, rows).view(values.shape[1:])
    if rows.device.type != "cpu" or not finite.all():  # a GPU must not wait for the result
        rows = torch.where(finite[:, None], rows, 0.0)  # zero times NaN is NaN
    return (weights.to(rows.dtype) @ rows).view(values.shape[1:])
