"""Privacy in the simulator: `simulate(..., privacy=CentralPrivacy(...))`, to choose ε beforehand.

Clipping, noise, the corrected step size and the accounting are the mechanisms that Flower's
strategies use. One thing differs: noise and secret cohorts are pure functions of (seed, round,
client), the same for every engine, device and number of processes. Noise that can be reproduced can
be subtracted, so a simulated model is not private; its ε is that of a deployment with the same
settings, in which noise comes from the system's entropy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.errors import require
from fedexp.privacy.accounting import BudgetSpentError, Release, composed_epsilon
from fedexp.privacy.mechanism import CentralMechanism, Mechanism, seeded_normals
from fedexp.privacy.settings import LocalPrivacy, Privacy

Clients = NDArray[np.int64]
ROUNDING = 1.0 + 1e-9  # of an ε that was computed for exactly so many rounds


@dataclass(frozen=True)
class SimulatedPrivacy:
    """The privacy of a simulated run, the same in all of its rounds.

    Every round is charged once, so what a run has spent follows from the number of its rounds: a
    run that continues from a state continues the count, given the same settings.

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
    ) -> None:
        """Raise `BudgetSpentError` where the rounds cost more than the settings allow.

        Args:
            privacy: the settings.
            rounds: rounds in total.
            cohort_of: returns the clients of a round; called for all of them with
                `LocalPrivacy(rounds=...)`, whose clients count the rounds they take part in.
        """
        if isinstance(privacy, LocalPrivacy):
            if privacy.rounds is not None:
                _require_few_releases(privacy.rounds, self.clients, rounds, cohort_of)
            return
        limit = privacy.epsilon
        if limit is not None and self.epsilon(rounds) > limit * ROUNDING:
            within = bisect_right(range(rounds), limit * ROUNDING, key=self.epsilon) - 1
            raise BudgetSpentError(
                f"{rounds} rounds would cost epsilon {self.epsilon(rounds):.4g}, more than the "
                f"{limit:g} promised, because the noise was computed for {privacy.clients} clients "
                f"and there are {self.clients}; simulate {within} rounds at most, or leave clients "
                "and cohort out of CentralPrivacy"
            )

    def cohort(self, round: int, drawn: Clients) -> Clients:
        """Return the clients of a round: `drawn`, or those of a secret draw, possibly none."""
        secret = self.mechanism.sample(self.clients, self.charged, round)
        return drawn if secret is None else np.array(secret, dtype=np.int64)

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

    def metrics(self, round: int, released: Aggregate) -> dict[str, float]:
        """Return ε and δ after `round` rounds, and the noise of this one."""
        return {
            **self.mechanism.metrics({self.charged: round}, released),
            "noise_multiplier": self.mechanism.noise_multiplier,
            "clip": self.mechanism.clip,
        }

    def epsilon(self, rounds: int) -> float:
        """Return ε of so many rounds."""
        return composed_epsilon({self.charged: rounds}, self.mechanism.delta)


def _require_few_releases(
    limit: int, clients: int, rounds: int, cohort_of: Callable[[int], Clients]
) -> None:
    """Raise `BudgetSpentError` where a client takes part in more than `limit` of the rounds."""
    counts = np.zeros(clients, np.int64)
    for round in range(1, rounds + 1):
        cohort = cohort_of(round)
        counts[cohort] += 1
        if round > limit and (counts[cohort] > limit).any():
            client = cohort[counts[cohort] > limit][0]
            raise BudgetSpentError(
                f"in round {round} client {client} would have taken part in more than the {limit} "
                f"rounds that its privacy budget allows; simulate {round - 1} rounds at most, take "
                "a smaller cohort, or raise LocalPrivacy(rounds=...)"
            )
