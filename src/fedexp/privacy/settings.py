"""What cannot be promised is refused; what promises less than it seems to is warned about.

What a user asks for: `CentralPrivacy` or `LocalPrivacy`, checked and made ready for a run.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from fedexp.algorithms import Algorithm
from fedexp.errors import require
from fedexp.privacy import accounting
from fedexp.privacy.accounting import Sampling
from fedexp.privacy.mechanism import CentralMechanism, LocalMechanism, Mechanism, best_norm_weight
from fedexp.server import Adagrad, Adam, Average, Momentum, ServerRule, Yogi


class PrivacyWarning(UserWarning):
    """The privacy settings promise less than they seem to."""


def check_numbers(
    clip: float, delta: float, noise_multiplier: float | None, epsilon: float | None
) -> None:
    require(
        math.isfinite(clip) and clip > 0,
        f"clip must be positive and finite, not {clip}; try the median norm of the updates",
    )
    require(
        (noise_multiplier is None) != (epsilon is None), "give either noise_multiplier or epsilon"
    )
    accounting.require_delta(delta)
    if noise_multiplier is not None:
        accounting.require_noise(noise_multiplier)
    if epsilon is not None:
        accounting.require_epsilon(epsilon)


def check_fit(algorithm: Algorithm, weighting: str, buffers: bool) -> None:
    """Refuse what the guarantee would not cover."""
    require(
        weighting == "uniform",
        f"privacy bounds what a client adds only with uniform weights, not {weighting}; "
        "leave weighting out",
    )
    require(
        not algorithm.client.init_broadcast(torch.zeros(1)),
        f"the control variates of {algorithm.name} are not covered by privacy; "
        "take a rule without them, such as fedexp or fedprox-exp",
    )
    require(
        not buffers,
        "the model's averaged buffers (BatchNorm statistics) are not covered by privacy; "
        "use a model with GroupNorm or none",
    )


def warn_weak(delta: float, clients: int) -> None:
    if delta >= 1.0 / clients:
        warnings.warn(
            f"delta = {delta} is not below 1 / {clients} clients: it allows to publish one of "
            f"them whole; take at most {0.1 / clients:.0e}",
            PrivacyWarning,
            stacklevel=3,
        )


READ_NO_NORMS = (Average, Momentum, Adagrad, Adam, Yogi)


class Privacy(Protocol):
    """The contract between the settings and whoever runs the rounds.

    Attributes:
        noised_by_clients: whether a round costs as soon as its clients are asked; else it costs
            when the server releases its sums.
    """

    noised_by_clients: ClassVar[bool]

    def prepare(
        self,
        *,
        clients: int,
        cohort: int,
        rounds: int,
        algorithm: Algorithm,
        weighting: str = "uniform",
        buffers: bool = False,
    ) -> Mechanism:
        """The mechanism for a run, or a `UsageError` that says why there is none.

        Args:
            clients: how many there are.
            cohort: how many take part in a round.
            rounds: rounds in all.
            algorithm: client and server rule.
            weighting: how updates are weighed; only "uniform" will do.
            buffers: whether the model has buffers that are averaged (BatchNorm).
        """


@dataclass(frozen=True)
class CentralPrivacy:
    """Differential privacy with a trusted server: it clips, sums and adds noise.

    Args:
        clip: C, the bound on the norm of each client's update.
        delta: δ, well below one over the number of clients.
        noise_multiplier: z, or
        epsilon: ε to stay within over all rounds, from which z follows; a run that could not stay
            within it, because rounds were repeated or clients left, ends early. One of the two.
        sampling: what an onlooker may know of the cohorts: "known" (the default), "fixed" or
            "poisson"; see `fedexp.privacy.epsilon`.
        cohort: the fixed number M that sums are divided by, and the largest cohort that is drawn;
            the cohort of the first round when None.
        clients: N, of which "poisson" draws M on average, and with which z is planned; the number
            there are at the start when None.
        norm_weight: κ, the weight of the squared norms in the release; 2 √(z / M) when None.
        noise_seed: for tests only: noise that can be repeated can be taken off again.

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
    noised_by_clients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self.clip, self.delta, self.noise_multiplier, self.epsilon)
        kappa = self.norm_weight
        require(
            kappa is None or (math.isfinite(kappa) and kappa > 0),
            f"norm_weight must be positive, not {kappa}; leave it out for the best one",
        )
        for name in ("cohort", "clients"):
            size = getattr(self, name)
            require(size is None or size >= 1, f"{name} must be at least 1, not {size}")

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
        check_fit(algorithm, weighting, buffers)
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
        kappa = _norm_weight(self.norm_weight, z, cohort, algorithm.server)
        return CentralMechanism(
            self.clip,
            z,
            self.delta,
            norm_weight=kappa,
            noise_seed=self.noise_seed,
            limit=self.epsilon,
            **population,
        )


@dataclass(frozen=True)
class LocalPrivacy:
    """Differential privacy without trust in the server: clients clip and add noise themselves.

    The server is given the same settings, to take the noise's share off the squared norms. Each
    round that a client takes part in is charged, with any two data sets of a client as neighbours.

    Args:
        clip: C, the bound on the norm of the update.
        delta: δ.
        noise_multiplier: z; the noise on each coordinate has standard deviation z C. Or
        epsilon: ε to stay within over `rounds`, from which z follows. One of the two.
        rounds: rounds a client takes part in at most; it refuses further ones. Needed with ε.
        noise_seed: for tests only.
    """

    clip: float
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    rounds: int | None = None
    noise_seed: int | None = None
    noised_by_clients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers(self.clip, self.delta, self.noise_multiplier, self.epsilon)
        require(
            self.epsilon is None or self.rounds is not None,
            "epsilon needs rounds too: how often a client takes part at most",
        )
        require(self.rounds is None or self.rounds >= 1, "rounds must be at least 1")

    def mechanism(self) -> LocalMechanism:
        """The noise that these settings ask for, the same at clients and server."""
        z = self.noise_multiplier
        if self.epsilon is not None and self.rounds is not None:
            z = 2.0 * accounting.noise_multiplier(self.epsilon, self.rounds, self.delta)
        assert z is not None
        return LocalMechanism(self.clip, z, self.delta)

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
        check_fit(algorithm, weighting, buffers)
        accounting.accounting_library()
        return self.mechanism()


def _norm_weight(asked: float | None, z: float, cohort: int, rule: ServerRule) -> float:
    if type(rule) in READ_NO_NORMS:
        return 0.0
    return best_norm_weight(z, cohort) if asked is None else asked
