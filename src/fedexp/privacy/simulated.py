"""Privacy in the simulator: `simulate(..., privacy=CentralPrivacy(...))`, to choose ε beforehand.

Clipping, noise, the corrected step size and the accounting are the mechanisms that Flower's
strategies use. One thing differs: noise and secret cohorts are pure functions of (seed, round,
client), the same for every engine, device and number of processes. Noise that can be reproduced can
be subtracted, so a simulated model is not private; its ε is that of a deployment with the same
settings, in which noise comes from the system's entropy.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.clipping import Limits, at_median
from fedexp.errors import require
from fedexp.privacy.accounting import BudgetSpentError, Release, Releases, composed_epsilon
from fedexp.privacy.mechanism import CentralMechanism, LocalMechanism, Mechanism, seeded_normals
from fedexp.privacy.settings import DROWNED, LocalPrivacy, Privacy, PrivacyWarning

Clients = NDArray[np.int64]
ROUNDING = 1.0 + 1e-9  # of an ε that was computed for exactly so many rounds
EXPOSED = (
    "start has rounds without privacy, so epsilon is infinite; begin another run, with "
    "start=record.model() if those rounds were trained on other clients"
)
UNCOUNTED = (
    "epsilon counts the rounds of this run; if the weights of start were trained on the same "
    "clients, simulate with start=record, which has what they released, or add it yourself"
)


@dataclass(frozen=True)
class SimulatedPrivacy:
    """The privacy of a simulated run, the same in all of its rounds.

    Every round is charged once. What was released before, with these settings or with others, is in
    the state, so that a run that continues from it continues the count.

    Args:
        mechanism: of the settings, seeded.
        charged: the cost of one round.
        clients: number of clients.
        seed: of the noise and of secret cohorts.
    """

    mechanism: Mechanism
    charged: Release
    clients: int
    seed: int

    @classmethod
    def of(
        cls,
        privacy: Privacy,
        mechanism: Mechanism,
        clients: int,
        cohort: int,
        seed: int,
    ) -> SimulatedPrivacy:
        """Return the privacy of a run; raise `UsageError` for a cohort that it does not cover.

        Args:
            privacy: the settings, as a strategy takes them.
            mechanism: what they have prepared for the run.
            clients: number of clients.
            cohort: clients per round.
            seed: of the run; `privacy.noise_seed` comes first.
        """
        seed = seed if privacy.noise_seed is None else privacy.noise_seed
        if isinstance(mechanism, CentralMechanism):
            mechanism = replace(mechanism, noise_seed=seed)
        charged = mechanism.plan(clients, cohort)
        if isinstance(mechanism, LocalMechanism):  # neighbours as of "fixed", without its secrecy
            charged = Release(mechanism.noise_multiplier, "fixed", clients, clients)
        require(
            charged.sampling == "poisson" or cohort <= charged.cohort,
            f"privacy divides by a fixed number of clients, so a cohort of {cohort} needs "
            f"CentralPrivacy(cohort={cohort}), not {charged.cohort}; or simulate with "
            f"cohort={charged.cohort}",
        )
        return cls(mechanism, charged, clients, seed)

    def require_budget(
        self,
        privacy: Privacy,
        rounds: int,
        cohort_of: Callable[[int], Clients],
        done: int,
        releases: Releases,
    ) -> None:
        """Raise `BudgetSpentError` where the rounds cost more than the settings allow.

        Warns where ε is infinite, which no budget allows.

        Args:
            privacy: the settings.
            rounds: rounds in total.
            cohort_of: returns the clients of a round; called for all of them with
                `LocalPrivacy(rounds=...)`, whose clients count the rounds they take part in.
            done: rounds that are done.
            releases: what was released before the next round.
        """
        limit = privacy.rounds if isinstance(privacy, LocalPrivacy) else privacy.epsilon
        if releases is None:
            if limit is not None:
                raise BudgetSpentError(EXPOSED)
            warnings.warn(EXPOSED, PrivacyWarning, stacklevel=2)
            return
        self.epsilon(releases, 1)  # refuse now, not after a round
        if limit is None:
            return
        if isinstance(privacy, LocalPrivacy):
            # who took part with other settings, or before this run, is not known: all are charged
            same, unit = releases.get(self.charged, 0), self.charged.unsampled
            costs = (count * (unit / other.unsampled) ** 2 for other, count in releases.items())
            counts = np.full(self.clients, math.fsum(costs) - min(same, done))
            left = range(1 if same else done + 1, rounds + 1)
            _require_few_releases(limit, counts, left, cohort_of)
            return
        epsilon = partial(self.epsilon, releases)
        if epsilon(rounds - done) > limit * ROUNDING:
            within = bisect_right(range(rounds - done), limit * ROUNDING, key=epsilon) - 1
            raise BudgetSpentError(
                f"{rounds} rounds would cost epsilon {epsilon(rounds - done):.4g}, more than the "
                f"{limit:g} promised: {epsilon(0):.4g} is spent, and the noise was computed for "
                f"{privacy.clients or self.clients} clients where there are {self.clients}; "
                f"simulate {done + max(0, within)} rounds at most, leave clients and cohort out of "
                "CentralPrivacy, or set noise_multiplier instead of epsilon"
            )

    def cohort(self, round: int, drawn: Clients) -> Clients:
        """Return the clients of a round: `drawn`, or those of a secret draw, possibly none."""
        secret = self.mechanism.sample(self.clients, self.charged, round)
        return drawn if secret is None else np.array(secret, dtype=np.int64)

    def clipped_to(self, limits: Limits | None) -> SimulatedPrivacy:
        """Return the privacy of a round, with the clip that follows the medians."""
        if limits is None:
            return self
        return replace(self, mechanism=at_median(self.mechanism, limits))

    def bits(self, deltas: Tensor) -> dict[str, Tensor]:
        """Return what clients add beside their updates [K, d]."""
        return self.mechanism.bits(deltas)

    def protected(self, deltas: Tensor, clients: Sequence[int], round: int) -> Tensor:
        """Return updates [K, d] of these clients as they may enter the sums.

        Clipped; with local privacy also noised, by separate draws for each.
        """
        mechanism = self.mechanism
        if isinstance(mechanism, CentralMechanism):
            return mechanism.clipped(deltas)
        rows = [
            mechanism.noised(delta, seeded_normals(self.seed, round, client)).to(deltas.dtype)
            for delta, client in zip(deltas, clients, strict=True)
        ]
        return torch.stack(rows)

    def release(self, aggregate: Aggregate, round: int) -> Aggregate:
        """Return the sums of all clients of a round as the server rule may see them."""
        return self.mechanism.release(aggregate, round)

    def metrics(self, releases: Releases, released: Aggregate) -> dict[str, float]:
        """Return ε and δ after these releases, and the noise of the last one."""
        return {
            **self.mechanism.metrics(releases, released),
            "noise_multiplier": self.mechanism.noise_multiplier,
            "clip": self.mechanism.clip,
        }

    def warn_of_noise(self, metrics: Mapping[str, float], noted: set[str]) -> None:
        """Warn, once, of a round whose mean update is noise; `noted` has what was warned of."""
        if metrics["noise_share"] == 1.0 and DROWNED not in noted:
            noted.add(DROWNED)
            warnings.warn(DROWNED, PrivacyWarning, stacklevel=3)

    def after(self, releases: Releases, rounds: int = 1) -> Releases:
        """Return the releases after further rounds; None stays None."""
        return None if releases is None else Counter(releases) + Counter({self.charged: rounds})

    def epsilon(self, releases: Releases, rounds: int) -> float:
        """Return ε of these releases and so many further rounds."""
        return composed_epsilon(self.after(releases, rounds), self.mechanism.delta)


def _require_few_releases(
    limit: float, counts: NDArray[np.float64], rounds: range, cohort_of: Callable[[int], Clients]
) -> None:
    """Raise `BudgetSpentError` where a client takes part more than `limit` times.

    `counts` is how often each has taken part before these rounds.
    """
    for round in rounds:
        cohort = cohort_of(round)
        counts[cohort] += 1
        if (counts[cohort] > limit * ROUNDING).any():
            client = cohort[counts[cohort] > limit * ROUNDING][0]
            raise BudgetSpentError(
                f"in round {round} client {client} would have taken part in more than the {limit} "
                f"rounds that its privacy budget allows; simulate {round - 1} rounds at most, take "
                "a smaller cohort, or raise LocalPrivacy(rounds=...)"
            )
