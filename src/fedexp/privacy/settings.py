"""`CentralPrivacy` and `LocalPrivacy`: the privacy settings of a run, checked, and their mechanism.

Settings whose guarantee would not hold are refused; those that guarantee less than it seems warn.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedexp.algorithms import Algorithm
from fedexp.client import zero_extras
from fedexp.errors import is_number, require, whole_number
from fedexp.privacy import accounting
from fedexp.privacy.accounting import Sampling
from fedexp.privacy.mechanism import (
    MARGINS,
    CentralMechanism,
    LocalMechanism,
    Numerator,
    best_norm_weight,
)


class PrivacyWarning(UserWarning):
    """The privacy settings guarantee less than they seem to, or leave nothing to learn from."""


DROWNED = (
    "the noise of a private round is as large as its mean update (noise_share 1): the model learns "
    "next to nothing; take more clients per round, a smaller clip or a larger epsilon"
)


@dataclass(frozen=True)
class CentralPrivacy:
    """Differential privacy with a trusted server: it clips, sums and adds noise.

    Args:
        clip: C, the bound on the norm of each client's update. Where the algorithm has a `bound`
            it is that of the first round, and the largest (docs/privacy.md#adaptive-clipping).
        delta: δ, well below one over the number of clients.
        noise_multiplier: z. Give this or epsilon.
        epsilon: limit on ε over all rounds, which determines z; a run that would exceed it, because
            rounds were repeated or clients left, ends early.
        sampling: what an observer may know about the cohorts: "known" (the default), "fixed" or
            "poisson"; see `fedexp.privacy.epsilon`.
        cohort: M, the fixed divisor of the sums and the largest cohort that is drawn; the cohort of
            the first round when None.
        clients: N, of which "poisson" draws M on average, and for which z is computed; the number
            at the start when None.
        norm_weight: κ, the weight of the squared norms in the release; 2 √(z / M) when None.
        noise_seed: for tests and simulations only: noise that can be reproduced can be subtracted.
            In `simulate` the seed of the run when None; elsewhere the system's entropy.
        numerator: the mean squared norm in the step size: "lower-bound" when None, or "unbiased",
            as in DP-FedEXP (docs/privacy.md#dp-fedexp). Does not affect ε.

    >>> CentralPrivacy(clip=1.0, delta=1e-5)
    Traceback (most recent call last):
    fedexp.errors.UsageError: give either noise_multiplier or epsilon
    """

    clip: float
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    sampling: Sampling = "known"
    cohort: int | None = None
    clients: int | None = None
    norm_weight: float | None = None
    noise_seed: int | None = None
    numerator: Numerator | None = None
    noised_by_clients: ClassVar[bool] = False  # a round is charged when its sums are released

    def __post_init__(self) -> None:
        check_noise(self)
        kappa = self.norm_weight
        require(
            kappa is None or (is_number(kappa) and kappa > 0),
            f"norm_weight must be positive, not {kappa!r}; leave it out for the best one",
        )
        for name in ("cohort", "clients"):
            if (size := getattr(self, name)) is not None:
                whole_number(name, size, least=1)

    def prepare(
        self,
        *,
        clients: int,
        cohort: int,
        rounds: int,
        algorithm: Algorithm,
        weighting: str = "uniform",
        buffers: bool = False,
    ) -> CentralMechanism:
        """Return the mechanism for a run; raise `UsageError` where there is none.

        Args:
            clients: number of clients.
            cohort: number of clients per round.
            rounds: rounds in total.
            algorithm: client and server rule.
            weighting: of the updates; must be "uniform".
            buffers: whether the model has buffers that are averaged (BatchNorm).
        """
        check_fit(self, algorithm, weighting, buffers)
        clients, cohort = self.clients or clients, self.cohort or cohort
        warn_weak(self.delta, clients)
        population: dict[str, Any] = {
            "sampling": self.sampling,
            "clients": clients,
            "cohort": cohort,
        }
        z = self.noise_multiplier
        if self.epsilon is not None:
            z = accounting.noise_multiplier(self.epsilon, rounds, self.delta, **population)
        assert z is not None
        accounting.epsilon(z, 1, self.delta, **population)  # refuse now, not after a round
        kappa = best_norm_weight(z, cohort) if self.norm_weight is None else self.norm_weight
        if not algorithm.server.reads_norms:
            kappa = 0.0
        return CentralMechanism(
            self.clip,
            z,
            self.delta,
            norm_weight=kappa,
            noise_seed=self.noise_seed,
            limit=self.epsilon,
            numerator=self.numerator or "lower-bound",
            bound=algorithm.bound,
            **population,
        )


@dataclass(frozen=True)
class LocalPrivacy:
    """Differential privacy without trust in the server: clients clip and add noise themselves.

    The server has the same settings, to subtract the noise from the squared norms. Each round that
    a client takes part in is charged, with any two data sets of a client as neighbours.

    Args:
        clip: C, the bound on the norm of the update.
        delta: δ.
        noise_multiplier: z; the noise on each coordinate has standard deviation z C. Give this or
            epsilon.
        epsilon: limit on ε over `rounds`, which determines z.
        rounds: the most rounds that a client takes part in; it refuses more. Required with epsilon.
        noise_seed: as in `CentralPrivacy`.
        numerator: as in `CentralPrivacy`.
    """

    clip: float
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    rounds: int | None = None
    noise_seed: int | None = None
    numerator: Numerator | None = None
    noised_by_clients: ClassVar[bool] = True  # a round is charged when its messages are sent

    def __post_init__(self) -> None:
        check_noise(self)
        require(
            self.epsilon is None or self.rounds is not None,
            "epsilon needs rounds too: the most rounds that a client takes part in",
        )
        if self.rounds is not None:
            whole_number("rounds", self.rounds, least=1)

    def mechanism(self) -> LocalMechanism:
        """Return the mechanism of these settings, the same on clients and server."""
        z = self.noise_multiplier
        if self.epsilon is not None and self.rounds is not None:
            z = 2.0 * accounting.noise_multiplier(self.epsilon, self.rounds, self.delta)
        assert z is not None
        return LocalMechanism(self.clip, z, self.delta, self.numerator or "lower-bound")

    def prepare(
        self,
        *,
        clients: int,
        cohort: int,
        rounds: int,
        algorithm: Algorithm,
        weighting: str = "uniform",
        buffers: bool = False,
    ) -> LocalMechanism:
        """Return the mechanism for a run, as `CentralPrivacy.prepare` does."""
        check_fit(self, algorithm, weighting, buffers)
        accounting.accounting_library()
        return self.mechanism()


Privacy = CentralPrivacy | LocalPrivacy
"""Privacy settings of a run."""


def check_noise(privacy: Privacy) -> None:
    """Refuse values out of range, and both or neither of noise_multiplier and epsilon."""
    clip, numerator = privacy.clip, privacy.numerator
    require(
        is_number(clip) and 0 < clip <= 1e30,
        f"clip must be positive and at most 1e30, not {clip!r}; try the median norm of the updates",
    )
    require(
        (privacy.noise_multiplier is None) != (privacy.epsilon is None),
        "give either noise_multiplier or epsilon",
    )
    accounting.require_delta(privacy.delta)
    if privacy.noise_multiplier is not None:
        accounting.require_noise(privacy.noise_multiplier)
    if privacy.epsilon is not None:
        accounting.require_epsilon(privacy.epsilon)
    require(
        numerator is None or numerator in MARGINS,
        f"numerator is {' or '.join(MARGINS)}, not {numerator!r}",
    )
    if privacy.noise_seed is not None:
        whole_number("noise_seed", privacy.noise_seed, least=0)


def check_fit(privacy: Privacy, algorithm: Algorithm, weighting: str, buffers: bool) -> None:
    """Refuse what the guarantee does not cover."""
    require(
        weighting == "uniform",
        f"privacy bounds a client's contribution only with uniform weights, not {weighting}; "
        "leave weighting out",
    )
    require(
        algorithm.bound is None or not privacy.noised_by_clients,
        "bound follows the norms of the updates, which clients with local privacy do not reveal; "
        "leave bound out, clip bounds what a client adds",
    )
    rule, zero = algorithm.client, torch.zeros(1)
    require(
        not rule.init_broadcast(zero),
        f"the control variates of {algorithm.name} are not covered by privacy; "
        "take a rule without them, such as fedexp or fedprox-exp",
    )
    names = ", ".join(zero_extras(rule, zero))
    require(
        not names,
        f"{algorithm.name} adds {names} to the sums, which privacy does not cover; "
        "take a rule without them, such as fedexp or fedprox-exp",
    )
    require(
        rule.weight_factor(1.0) is None,
        f"{algorithm.name} scales the clients' weights, by which privacy does not bound what they "
        "add; take a rule without weight_factor, such as fedexp or fedprox-exp",
    )
    require(
        not buffers,
        "the model's averaged buffers (BatchNorm statistics) are not covered by privacy; "
        "use a model with GroupNorm or none",
    )


def warn_weak(delta: float, clients: int) -> None:
    """Warn of a δ that is not well below one over the number of clients."""
    if delta >= 1.0 / clients:
        warnings.warn(
            f"delta = {delta} is not below 1 / {clients} clients: it allows publishing all data of "
            f"one of them; take at most {0.1 / clients:.0e}",
            PrivacyWarning,
            stacklevel=3,
        )


def warn_seeded(privacy: Privacy) -> None:
    """Warn of a `noise_seed` where the settings are deployed."""
    if privacy.noise_seed is not None:
        warnings.warn(
            "whoever knows noise_seed can subtract the noise, so that epsilon does not hold; leave "
            "noise_seed out when deploying",
            PrivacyWarning,
            stacklevel=3,
        )
