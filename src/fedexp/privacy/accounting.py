"""What a run costs: (ε, δ) of noised sums over rounds, and the noise for a given ε.

The unit is a client: the guarantee holds for all of its data at once. Every function takes the
noise multiplier z, the noise's standard deviation over the largest norm that one client adds to
the sum. The library `dp-accounting` does the computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, get_args

from fedexp.data.extras import extra
from fedexp.errors import require

Sampling = Literal["known", "fixed", "poisson"]
ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)  # fractions may not converge


def epsilon(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    *,
    sampling: Sampling = "known",
    clients: int | None = None,
    cohort: int | None = None,
) -> float:
    """ε after so many rounds, at this δ.

    Args:
        noise_multiplier: z > 0.
        rounds: rounds done; 0 gives 0.
        delta: δ in (0, 1), well below one over the number of clients.
        sampling: what an onlooker knows of the cohorts. "known": everything, so each client is
            charged for every round; exact (Balle and Wang, 2018). "poisson": each client takes
            part by a secret coin of its own; Rényi accounting (Mironov et al., 2019). "fixed":
            secret cohorts of a fixed size, drawn without replacement; Rényi accounting (Wang et
            al., 2019), where neighbours differ in one client *replaced*, which moves a sum by 2
            instead of 1: a stronger promise at a higher price.
        clients: N, where the sampling is secret.
        cohort: clients a round, or their expected number, where the sampling is secret.

    >>> round(epsilon(1.0, rounds=1, delta=1e-5), 3)
    4.377
    """
    require_noise(noise_multiplier)
    _check(delta, sampling, clients, cohort)
    require(rounds >= 0, f"rounds must not be negative, but is {rounds}")
    if rounds == 0:
        return 0.0
    library = accounting_library()
    gaussian = library.get_epsilon_gaussian
    if sampling == "known":
        return float(gaussian(noise_multiplier / math.sqrt(rounds), delta))
    assert clients is not None
    assert cohort is not None
    orders, losses = _renyi(noise_multiplier, sampling, clients, cohort)
    sampled, _ = library.rdp.compute_epsilon(orders, [loss * rounds for loss in losses], delta)
    replaced = noise_multiplier if sampling == "poisson" else noise_multiplier / 2
    # both bounds hold; where nearly all take part the second is the smaller one
    return min(float(sampled), float(gaussian(replaced / math.sqrt(rounds), delta)))


def noise_multiplier(
    epsilon: float,
    rounds: int,
    delta: float,
    *,
    sampling: Sampling = "known",
    clients: int | None = None,
    cohort: int | None = None,
) -> float:
    """The smallest noise multiplier that stays within ε over all rounds, to 0.1 %.

    >>> round(noise_multiplier(4.377, rounds=1, delta=1e-5), 2)
    1.0
    """
    require_epsilon(epsilon)
    _check(delta, sampling, clients, cohort)
    require(rounds >= 1, f"rounds must be at least 1, not {rounds}")
    if sampling == "known":
        sigma = accounting_library().get_sigma_gaussian(epsilon, delta)
        return float(sigma) * math.sqrt(rounds)
    options: dict[str, Any] = {"sampling": sampling, "clients": clients, "cohort": cohort}
    return _search(lambda z: _epsilon(z, rounds, delta, **options) <= epsilon)


def accounting_library() -> Any:
    """dp-accounting, or one line that says how to get it."""
    return extra("dp_accounting", "privacy accounting", "dp-accounting", "privacy")


_epsilon = epsilon  # `noise_multiplier` has an argument of that name


@lru_cache(maxsize=256)
def _renyi(
    noise_multiplier: float, sampling: Sampling, clients: int, cohort: int
) -> tuple[list[float], list[float]]:
    """The orders and the Rényi divergences of one round, which add up over rounds."""
    library = accounting_library()
    if sampling == "poisson":
        relation = library.NeighboringRelation.REPLACE_SPECIAL
        gaussian = library.GaussianDpEvent(noise_multiplier)
        event = library.PoissonSampledDpEvent(cohort / clients, gaussian)
    else:  # the library leaves it to the caller that replacing a client moves the sum by 2
        relation = library.NeighboringRelation.REPLACE_ONE
        gaussian = library.GaussianDpEvent(noise_multiplier / 2)
        event = library.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    accountant = library.rdp.RdpAccountant(ORDERS, relation)
    accountant.compose(event)
    return list(accountant.orders), list(accountant.rdp)


def _search(enough: Callable[[float], bool], precision: float = 1e-3) -> float:
    """The smallest number for which `enough` holds, by doubling and halving its logarithm."""
    high = 1.0
    while not enough(high):
        high *= 2.0
        require(high < 1e6, "no noise reaches this epsilon and delta; ask for a larger epsilon")
    low = high / 2.0
    while low > 1e-3 and enough(low):
        low, high = low / 2.0, low
    while high > low * (1.0 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def require_noise(noise_multiplier: float) -> None:
    """Refuse a noise multiplier that protects nothing."""
    require(
        math.isfinite(noise_multiplier) and noise_multiplier > 0,
        f"noise_multiplier must be positive, not {noise_multiplier}; leave privacy out for none",
    )


def require_epsilon(epsilon: float) -> None:
    """Refuse an ε that cannot be had, or that promises nothing."""
    require(
        math.isfinite(epsilon) and epsilon > 0,
        f"epsilon must be positive and finite, not {epsilon}; leave privacy out for none",
    )


def require_delta(delta: float) -> None:
    """Refuse a δ that is not a probability strictly between 0 and 1."""
    require(0 < delta < 1, f"delta must lie in (0, 1), not {delta}; 1e-5 is usual")


def _check(delta: float, sampling: Sampling, clients: int | None, cohort: int | None) -> None:
    require_delta(delta)
    names = get_args(Sampling)
    require(sampling in names, f"sampling is one of {', '.join(names)}, not {sampling!r}")
    if sampling != "known":
        require(
            clients is not None and cohort is not None and 1 <= cohort <= clients,
            f"{sampling} sampling needs the number of clients and a cohort of 1 to as many; "
            f"got {clients} and {cohort}",
        )
