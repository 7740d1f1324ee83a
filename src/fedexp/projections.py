"""Projections onto convex sets, the origin of FedExP (sec. 3.1, App. C.4).

POCS moves to the mean of the projections of a point, w ← w + λ (mean P_i(w) - w). (The paper
prints a minus sign there.) EPPM extrapolates: λ = mean ||P_i(w) - w||² / ||mean P_i(w) - w||² >= 1
(Pierra, 1984), which is FedExP's step size with factor 1, and is computed by the same function.
See docs/paper.md#projection-methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require
from fedexp.server import Average, ExP, ServerRule

Relaxation = Literal["extrapolated"] | float


class ConvexSet(Protocol):
    """A closed convex set, given by its projection."""

    def project(self, w: Any) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Affine:
    """{w : A w = b}, or the least-squares solutions where there are none.

    The projection is w - A⁺(A w - b), with the pseudo-inverse from a singular value decomposition
    A = U S Vᵀ (App. C.4): singular values below `rank_tolerance` times the largest count as zero.

    >>> w = Affine([[1.0, 1.0]], [2.0]).project(torch.zeros(2, dtype=torch.float64))
    >>> [round(x, 12) for x in w.tolist()]
    [1.0, 1.0]
    """

    A: Any
    b: Any
    rank_tolerance: float = 1e-12

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """V₁ and the coordinates V₁ᵀ w of the solutions (docs/paper.md#linear-projection)."""
        A, b = _float64(self.A), _float64(self.b)
        require(
            A.ndim == 2 and b.shape == A.shape[:1],
            f"need A [n, d] and b [n], not {tuple(A.shape)} and {tuple(b.shape)}",
        )
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        rank = int((self.rank_tolerance * S.max() < S).sum()) if S.numel() else 0
        return Vh[:rank].T, (U[:, :rank].T @ b) / S[:rank]

    def project(self, w: Any) -> Tensor:
        w, (V, coordinates) = _float64(w), self._factors
        return w + V @ (coordinates - V.T @ w)


@dataclass(frozen=True, eq=False)
class HalfSpace:
    """{w : a·w <= b}.

    >>> HalfSpace([2.0, 0.0], 2.0).project(torch.tensor([3.0, 5.0], dtype=torch.float64)).tolist()
    [1.0, 5.0]
    """

    a: Any
    b: float

    def project(self, w: Any) -> Tensor:
        w, a = _float64(w), _float64(self.a)
        require(bool(a.any()), "the normal of a half-space must not be zero")
        excess = (a @ w - self.b).clamp(min=0)
        return w - (excess / (a @ a)) * a


@dataclass(frozen=True, eq=False)
class Ball:
    """{w : ||w - center|| <= radius}.

    >>> Ball([0.0, 0.0], 5.0).project(torch.tensor([6.0, 8.0], dtype=torch.float64)).tolist()
    [3.0, 4.0]
    """

    center: Any
    radius: float

    def __post_init__(self) -> None:
        require(self.radius >= 0, f"the radius of a ball must be >= 0, not {self.radius}")

    def project(self, w: Any) -> Tensor:
        w, center = _float64(w), _float64(self.center)
        away = w - center
        norm = torch.linalg.vector_norm(away)
        return w if norm <= self.radius else center + away * (self.radius / norm)


@dataclass(frozen=True, eq=False)
class Box:
    """{w : low <= w <= high}, coordinate by coordinate.

    >>> Box([0.0, 0.0], [1.0, 1.0]).project(torch.tensor([-1.0, 0.5], dtype=torch.float64)).tolist()
    [0.0, 0.5]
    """

    low: Any
    high: Any

    def project(self, w: Any) -> Tensor:
        w, low, high = _float64(w), _bound(self.low), _bound(self.high)
        require(bool((low <= high).all()), "a box needs low <= high in every coordinate")
        return torch.maximum(low, torch.minimum(high, w))


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of `solve`.

    Attributes:
        w: the last iterate.
        converged: whether its root mean square distance to the sets is within the tolerance.
        iterates: w⁰, w¹, ..., shape [rounds + 1, d].
        steps: the relaxation λ of each round.
        distances: root mean square distance to the sets, before each round and at the end.
    """

    w: Tensor
    converged: bool
    iterates: Tensor
    steps: list[float]
    distances: list[float]


def solve(
    sets: Sequence[ConvexSet],
    w0: Any,
    relaxation: Relaxation = "extrapolated",
    rounds: int = 1000,
    tolerance: float = 1e-10,
) -> Solution:
    """Find a point in the intersection of convex sets by parallel projections.

    Args:
        sets: anything with `project`.
        w0: the starting point.
        relaxation: "extrapolated" for EPPM, or a number in (0, 2) for POCS (1 is the classic one).
        rounds: the maximum number of rounds.
        tolerance: stop when the root mean square distance to the sets is at most this.

    >>> lines = [Affine([[3.0, 1.0]], [3.0]), Affine([[1.0, 1.0]], [3.0])]
    >>> found = solve(lines, [0.0, 0.0], rounds=200)
    >>> found.converged, [round(x, 6) + 0.0 for x in found.w.tolist()]
    (True, [0.0, 3.0])
    """
    require(len(sets) > 0, "need at least one set")
    rule = _server_rule(relaxation)
    w = _float64(w0)
    state, iterates = rule.init(w), [w]
    steps: list[float] = []
    distances: list[float] = []
    for _ in range(rounds + 1):
        deltas = torch.stack([w - convex.project(w) for convex in sets])
        aggregate = Aggregate.of(deltas)
        distances.append(aggregate.mean_sq_norm.sqrt().item())
        if distances[-1] <= tolerance or len(steps) == rounds:
            break
        w, state, metrics = rule.step(w, aggregate, state)
        iterates.append(w)
        steps.append(metrics["server_lr"].item())
    return Solution(w, distances[-1] <= tolerance, torch.stack(iterates), steps, distances)


def _server_rule(relaxation: Relaxation) -> ServerRule:
    if relaxation == "extrapolated":
        return ExP(eps=0.0, factor=1.0)
    number = isinstance(relaxation, int | float) and 0 < relaxation < 2
    require(number, f'relaxation is "extrapolated" or a number in (0, 2), not {relaxation!r}')
    return Average(float(relaxation))


def _float64(value: Any) -> Tensor:
    tensor = _bound(value)
    require(bool(tensor.isfinite().all()), "sets and starting points must be finite")
    return tensor


def _bound(value: Any) -> Tensor:
    """Return a value as float64; infinite values are allowed, for unbounded boxes."""
    return torch.as_tensor(np.asarray(value), dtype=torch.float64)
