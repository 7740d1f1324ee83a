"""Mechanisms: clip updates, add noise to their sums, and release an `Aggregate` to step with.

Server rules need no change. They read the mean update and the mean squared norm from the sums.
A mechanism releases the first unbiased, the second as a lower bound that noise does not inflate, or
unbiased (`Numerator`); ||mean||² is that of the noised mean, the step actually taken.
docs/privacy.md derives all three.
Noise comes from the entropy of the operating system, or from a seed in tests and simulations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.clipping import LONGER, clip, follow, length_bits
from fedexp.errors import require
from fedexp.privacy.accounting import Release, Releases, Sampling, composed_epsilon
from fedexp.seeding import generator

Numerator = Literal["lower-bound", "unbiased"]
"""Estimates of the mean squared norm that FedExP's step size is computed from under noise."""
# Standard deviations of the noise that are subtracted from the mean squared norm.
MARGINS: dict[Numerator, float] = {"lower-bound": 2.0, "unbiased": 0.0}
Normals = Callable[[int], Tensor]  # returns so many independent draws of N(0, 1), in float64


def joint_sensitivity(clip: float, norm_weight: float, bit_weight: float = 0.0) -> float:
    """Return the largest norm of (Δ_i, κ ||Δ_i||² / C, β C b_i) for ||Δ_i|| <= C and bits b_i = ±1.

    It is C √(1 + κ² + β²).
    """
    return clip * math.sqrt(1.0 + norm_weight**2 + bit_weight**2)


def best_norm_weight(noise_multiplier: float, cohort: int) -> float:
    """Return κ = 2 √(z / M), the default weight of the squared norms in the joint release.

    It minimises (1 + κ²)(1 + 16 z² / (κ² M²)): the factor by which the scalar raises the variance
    of the update, times one plus the relative variance of the scalar itself, for a mean squared
    norm of C²/4 (updates of half the clip).

    >>> best_norm_weight(1.0, 100)
    0.2
    """
    return 2.0 * math.sqrt(noise_multiplier / cohort)


def released_sq_norm(
    sq_norm: Tensor, deviation: Tensor | float, most: Tensor | float, numerator: Numerator
) -> Tensor:
    """Return a sum of squared norms in [0, most], given an unbiased estimate of this deviation.

    "lower-bound" is a value that noise rarely inflates: clamping at 0 alone would leave the
    positive half of the noise in the step size. "unbiased" is the estimate itself; values outside
    the range, which a sum of clipped squares cannot have, are clamped to it.
    """
    bound = sq_norm - MARGINS[numerator] * deviation
    return bound.clamp(min=0.0).minimum(torch.as_tensor(most).to(bound))


def system_normals(count: int) -> Tensor:
    """Return standard normal draws by the Box-Muller method, all from the system's entropy.

    The noise of a release must stay unknown to whoever sees the model. With a seeded generator,
    even a good one, it would follow from a few bytes that someone may learn or guess.

    >>> bool((system_normals(4) != system_normals(4)).any())
    True
    """
    pairs = (count + 1) // 2
    uniform = system_uniforms(2 * pairs)
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:pairs]))  # 1 - u is in (0, 1]
    angle = 2.0 * np.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normal[:count])


def system_uniforms(count: int) -> NDArray[np.float64]:
    """Return uniform draws in [0, 1) with 53 random bits each, from the system's entropy."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seeded_normals(seed: int, *numbers: int) -> Normals:
    """Return a reproducible source of normals; a release with it is not private.

    >>> bool((seeded_normals(0, 1)(4) == seeded_normals(0, 1)(4)).all())
    True
    """
    rng = generator(seed, "privacy", *numbers)
    return lambda count: torch.from_numpy(rng.standard_normal(count))


def normals(seed: int | None, *numbers: int) -> Normals:
    """Return the system's source of normals, or a seeded one where a seed is given."""
    return system_normals if seed is None else seeded_normals(seed, *numbers)


@dataclass(frozen=True)
class CentralMechanism:
    """Central privacy: a trusted server adds Gaussian noise to (Σ Δ_i, κ/C Σ ||Δ_i||²) at once.

    A round is planned, drawn, charged to a `Ledger` and released, in this order. It is released
    whenever its cohort was drawn, even if the cohort is empty or nobody answered.

    Args:
        clip: C, the bound on each update's norm.
        noise_multiplier: z; the noise has standard deviation z C √(1 + κ²) in every coordinate.
        delta: δ of the accounting.
        clients: N.
        cohort: M, the fixed divisor of the sums, whoever answers; no larger cohort is drawn.
        norm_weight: κ; 0 releases no squared norms, for rules that read none.
        sampling: see `epsilon`.
        noise_seed: for tests only.
        limit: ε that the run must not exceed.
        numerator: how the squared norms are released.
        bound: clients are clipped to this many medians, which follow one noised bit per client: C
            is that of a round, see `fedexp.clipping.at_median`. None for a constant C.
    """

    clip: float
    noise_multiplier: float
    delta: float
    clients: int
    cohort: int
    norm_weight: float
    sampling: Sampling = "known"
    noise_seed: int | None = None
    limit: float | None = None
    numerator: Numerator = "lower-bound"
    bound: float | None = None
    hides_client_metrics: ClassVar[bool] = True

    @property
    def bit_weight(self) -> float:
        """Return β, the weight of the bits in the release: that of the squared norms by default."""
        if self.bound is None:
            return 0.0
        return best_norm_weight(self.noise_multiplier, self.cohort)

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the noise on every coordinate of the sum."""
        return self.noise_multiplier * joint_sensitivity(
            self.clip, self.norm_weight, self.bit_weight
        )

    def plan(self, clients: int, wanted: int) -> Release:
        """Return the release of a round among so many clients.

        With Poisson sampling each client is drawn with probability M / N, and with less where there
        are more than N clients, so that at most M are expected. Otherwise `wanted` are drawn, at
        most M.
        """
        if self.sampling == "poisson":
            clients, wanted = max(clients, self.clients), self.cohort
        size = min(wanted, self.cohort, clients)
        return Release(self.noise_multiplier, self.sampling, clients, size)

    def sample(self, clients: int, release: Release, round: int) -> list[int] | None:
        """Return the indices of a secretly drawn cohort; None where the cohort is known."""
        if self.sampling == "known":
            return None
        if self.noise_seed is None:
            drawn = system_uniforms(clients)
        else:
            drawn = generator(self.noise_seed, "secret cohort", round).random(clients)
        if self.sampling == "fixed":
            return sorted(drawn.argsort()[: release.cohort].tolist())
        return [i for i, coin in enumerate(drawn) if coin < release.probability]

    def clipped(self, updates: Tensor) -> Tensor:
        """Return updates [d] or [M, d] as they may enter the sums."""
        return clip(updates, self.clip)

    def bits(self, updates: Tensor) -> dict[str, Tensor]:
        """Return what clients add beside their updates [M, d], before these are clipped."""
        if self.bound is None:
            return {}
        return {LONGER: length_bits(updates, self.clip / self.bound)}

    def release(self, aggregate: Aggregate, round: int) -> Aggregate:
        """Return noised sums with the fixed weight M; the scalar is in [0, M C²]."""
        bits = aggregate.extras.get(LONGER, torch.zeros(1, device=aggregate.update.device))
        _require_no_extras(aggregate, LONGER)
        dim = aggregate.update.numel()
        draws = normals(self.noise_seed, round)(dim + 1 + (self.bound is not None))
        noise = self.sigma * draws.to(aggregate.update.device)
        update = (aggregate.update + noise[:dim]).to(aggregate.update.dtype)
        extras = {}
        if self.bound is not None:
            noisy_bits = bits[0] + noise[dim + 1] / (self.bit_weight * self.clip)
            extras = follow(self.clip / self.bound, noisy_bits / self.cohort)
        size = torch.full_like(aggregate.weight, self.cohort)
        sq_norm = torch.full_like(aggregate.sq_norm, math.nan)
        if self.norm_weight > 0:
            scale = self.clip / self.norm_weight
            noisy = aggregate.sq_norm + scale * noise[dim]
            most = self.cohort * self.clip**2
            sq_norm = released_sq_norm(noisy, scale * self.sigma, most, self.numerator)
        sums = {"weight": size, "update": update, "sq_norm": sq_norm, "count": size}
        return replace(aggregate, **sums, extras=extras)

    def metrics(self, releases: Releases, released: Aggregate | None) -> dict[str, float]:
        """Return ε and δ of these releases, and the share of noise in the last mean update."""
        spent = composed_epsilon(releases, self.delta)
        share = _noise_share(released, (self.sigma / self.cohort) ** 2)
        clip = {} if self.bound is None else {"clip": self.clip}
        return {"epsilon": spent, "delta": self.delta, **share, **clip}

    def config(self) -> dict[str, float]:
        """Return the config that clients are sent."""
        return {}


@dataclass(frozen=True)
class LocalMechanism:
    """Local privacy: clients noise their own updates; the server subtracts d σ² from each ||·||².

    Args:
        clip: C, the clients' bound.
        noise_multiplier: z; each client adds noise of standard deviation σ = z C.
        delta: δ of the accounting.
        numerator: how the squared norms enter the step size.
    """

    clip: float
    noise_multiplier: float
    delta: float
    numerator: Numerator = "lower-bound"
    hides_client_metrics: ClassVar[bool] = False
    limit: ClassVar[float | None] = None  # each client enforces its own

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the noise on every coordinate of one update."""
        return self.noise_multiplier * self.clip

    def plan(self, clients: int, wanted: int) -> Release:
        """Return the cost of a round to a client: any two of its inputs are neighbours."""
        # two inputs differ by up to 2 C
        return Release(self.noise_multiplier / 2, "known", clients, min(wanted, clients))

    def sample(self, clients: int, release: Release, round: int) -> list[int] | None:
        """Return None: no cohort is secret."""
        return None

    def clipped(self, updates: Tensor) -> Tensor:
        """Return the updates as they are: clients have clipped them."""
        return updates

    def bits(self, updates: Tensor) -> dict[str, Tensor]:
        """Return nothing: what a client adds beside its update would need noise of its own."""
        return {}

    def noised(self, update: Tensor, draw: Normals) -> Tensor:
        """Return what a client sends: its update [d] clipped and noised, in float64.

        An update that is not finite counts as zero.
        """
        finite = bool(update.isfinite().all())
        clipped = clip(update, self.clip) if finite else torch.zeros_like(update)
        return clipped + self.sigma * draw(update.numel()).to(update.device)

    def release(self, aggregate: Aggregate, round: int) -> Aggregate:
        """Return the sums with squared norms from which the noise is subtracted.

        ||Δ_i + n_i||² has mean ||Δ_i||² + d σ² and variance 2 d σ⁴ + 4 σ² ||Δ_i||².
        """
        _require_no_extras(aggregate)
        variance, inflation = self.sigma**2, aggregate.update.numel() * self.sigma**2
        deviation = (aggregate.weight * variance * (2 * inflation + 4 * self.clip**2)).sqrt()
        unbiased = aggregate.sq_norm - aggregate.weight * inflation
        most = aggregate.weight * self.clip**2
        sq_norm = released_sq_norm(unbiased, deviation, most, self.numerator)
        return replace(aggregate, sq_norm=sq_norm)

    def metrics(self, releases: Releases, released: Aggregate | None) -> dict[str, float]:
        """Return a client's ε and δ after these releases, and the share of noise in the mean."""
        spent = composed_epsilon(releases, self.delta)
        clients = 1.0 if released is None else max(float(released.count), 1.0)
        share = _noise_share(released, self.sigma**2 / clients)
        return {"epsilon": spent, "delta": self.delta, **share}

    def config(self) -> dict[str, float]:
        """Return the config that clients are sent, with which they must have marked replies."""
        return {"fedexp.clip": self.clip, "fedexp.noise": self.noise_multiplier}


Mechanism = CentralMechanism | LocalMechanism
"""The server's part of privacy in a round; returned by `prepare` of the settings."""


def _noise_share(released: Aggregate | None, variance: float) -> dict[str, float]:
    """Return the expected fraction of noise in ||mean||², at most 1."""
    if released is None:
        return {}
    whole = float(released.sq_norm_of_mean)
    noise = released.update.numel() * variance
    return {"noise_share": min(1.0, noise / whole) if whole > 0 else 1.0}


def _require_no_extras(aggregate: Aggregate, *allowed: str) -> None:
    names = ", ".join(sorted(aggregate.extras.keys() - {*allowed}))
    require(
        not names,
        f"the sums include {names}, which privacy does not cover; use a client rule without "
        "control variates and a model without BatchNorm (GroupNorm will do)",
    )
