"""Privacy accounting: (ε, δ) of noised sums over rounds, and the noise for a given ε.

The unit is a client: the guarantee holds for all of its data at once. The noise multiplier z is
the noise's standard deviation over the largest norm that one client adds to the sum. Rounds may
differ in noise, cohort and number of clients; each is charged as it was. The bounds are computed by
the library `dp-accounting`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from fedexp.errors import FedExPError, is_number, require, whole_number
from fedexp.optional import extra

Sampling = Literal["known", "fixed", "poisson"]
"""What an observer knows about the cohorts, see `epsilon`."""
ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)  # fractional orders may not converge
MAX_KINDS = 12  # distinct sampling probabilities that are convolved without rounding
COARSER = 1.05  # where there are more, they are rounded up to powers of this
FINEST_STEP, MAX_STEPS = 1e-5, 1e6  # of the grid of privacy losses
MIN_DELTA = 1e-10  # below, rounding errors in the convolutions could matter
MAX_EPSILON = 1e3  # above, no bound is meaningful


class BudgetSpentError(FedExPError):
    """A further release would exceed the privacy budget."""


@dataclass(frozen=True)
class Release:
    """One noised sum, with the parameters that determine its cost.

    Args:
        noise_multiplier: z > 0.
        sampling: what an observer knows about the cohort; see `epsilon`.
        clients: N, from which the cohort was drawn.
        cohort: M, its size or expected size; 1 <= M <= N.
    """

    noise_multiplier: float
    sampling: Sampling = "known"
    clients: int = 1
    cohort: int = 1

    def __post_init__(self) -> None:
        require_noise(self.noise_multiplier)
        names = get_args(Sampling)
        require(
            self.sampling in names, f"sampling is one of {', '.join(names)}, not {self.sampling!r}"
        )
        require(
            1 <= self.cohort <= self.clients,
            f"a cohort of {self.cohort} cannot be drawn from {self.clients} clients; take 1 to as "
            "many as there are",
        )

    @property
    def probability(self) -> float:
        """Return the probability that a client is in the cohort."""
        return self.cohort / self.clients

    @property
    def unsampled(self) -> float:
        """Return the noise multiplier without sampling, for a client that is in every cohort.

        Neighbours of "fixed" cohorts have one client replaced, which changes the sum by 2 C.
        """
        return self.noise_multiplier / (2.0 if self.sampling == "fixed" else 1.0)


Releases = Mapping[Release, int] | None
"""Releases with their counts; None where something was released without noise."""


class Ledger:
    """The releases of a run. Each is charged before it is made, and no charge is undone.

    Args:
        releases: those made before, with their counts.
        save: called with all releases before a new one counts, to store them.

    >>> ledger = Ledger()
    >>> ledger.charge(Release(2.0)); ledger.charge(Release(2.0)); ledger.charge(Release(1.0))
    >>> ledger.count, round(ledger.epsilon(1e-5), 3)
    (3, 5.545)
    """

    def __init__(
        self,
        releases: Mapping[Release, int] | None = None,
        save: Callable[[Mapping[Release, int]], None] | None = None,
    ) -> None:
        self.releases = dict(releases or {})
        self._save = save

    @property
    def count(self) -> int:
        """Return the number of charged releases."""
        return sum(self.releases.values())

    def charge(self, release: Release) -> None:
        """Charge a release that is about to be made."""
        after = self._with(release)
        if self._save is not None:
            self._save(after)
        self.releases = after

    def epsilon(self, delta: float, *further: Release) -> float:
        """Return ε at this δ of all charged releases together with further ones."""
        return composed_epsilon(self._with(*further), delta)

    def require_room(self, release: Release, limit: float, delta: float) -> None:
        """Raise `BudgetSpentError` where a further release would exceed the ε `limit`."""
        cost = self.epsilon(delta, release)
        if cost > limit * (1.0 + 1e-9):
            raise BudgetSpentError(
                f"a further round would cost epsilon {cost:.4g}, more than the {limit:g} promised; "
                f"{self.count} releases were charged and cost {self.epsilon(delta):.4g}, including "
                "those of rounds that were lost and repeated"
            )

    def _with(self, *further: Release) -> dict[Release, int]:
        return Counter(self.releases) + Counter(further)


def epsilon(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    *,
    sampling: Sampling = "known",
    clients: int | None = None,
    cohort: int | None = None,
) -> float:
    """Return ε at this δ after equal rounds; see `composed_epsilon` for unequal ones.

    Args:
        noise_multiplier: z > 0.
        rounds: number of rounds; 0 gives 0.
        delta: δ in (0, 1), well below one over the number of clients.
        sampling: what an observer knows about the cohorts. "known": everything, so each client is
            charged for every round. "poisson": each client takes part independently by a secret
            coin flip. "fixed": secret cohorts of a fixed size, drawn without replacement;
            neighbours differ in one client *replaced*, which changes a sum by 2 instead of 1: a
            stronger guarantee at a higher cost.
        clients: N, for secret sampling.
        cohort: clients per round, or their expected number, for secret sampling.

    >>> round(epsilon(1.0, rounds=1, delta=1e-5), 3)
    4.377
    """
    require(rounds >= 0, f"rounds must not be negative, but is {rounds}")
    release = _release(noise_multiplier, sampling, clients, cohort)
    return composed_epsilon({release: rounds}, delta)


def composed_epsilon(releases: Releases, delta: float) -> float:
    """Return ε at this δ of releases that may differ, each with its count; infinity for None.

    Several bounds hold, and the smallest is returned:

    - the analytic Gaussian mechanism (Balle and Wang, 2018) without amplification by sampling;
      exact for "known" cohorts, for which it is the only one;
    - Rényi accounting: Mironov et al. (2019) for "poisson", Wang et al. (2019) for "fixed";
    - privacy loss distributions, convolved on a grid with pessimistic rounding (Doroshenko et al.,
      2022); the smallest in most cases, by a tenth for "poisson" and up to a half for "fixed".

    >>> one, other = Release(2.0, "poisson", 100, 10), Release(2.0, "poisson", 200, 10)
    >>> composed_epsilon({one: 20}, 1e-5) > composed_epsilon({one: 10, other: 10}, 1e-5)
    True
    """
    require_delta(delta)
    if releases is None:
        return math.inf
    made = {release: count for release, count in releases.items() if count}
    samplings = {release.sampling for release in made}
    require(
        len(samplings) <= 1,
        f"one account cannot mix {' and '.join(sorted(samplings))} cohorts, of which local privacy "
        "counts as fixed: their neighbours differ; begin another run",
    )
    if not made:
        return 0.0
    precision = math.sqrt(sum(count / r.unsampled**2 for r, count in made.items()))
    bound = float(accounting_library().get_epsilon_gaussian(1.0 / precision, delta))
    if samplings == {"known"} or all(release.probability == 1.0 for release in made):
        return bound
    return _sampled_epsilon(tuple(made.items()), delta, bound)


@lru_cache(maxsize=64)
def _sampled_epsilon(made: tuple[tuple[Release, int], ...], delta: float, bound: float) -> float:
    """Return the smallest bound for secret cohorts; `bound` is one of them."""
    bound = min(bound, _renyi_epsilon(dict(made), delta))
    if delta < MIN_DELTA or bound > MAX_EPSILON:
        return bound
    return min(bound, _convolved_epsilon(dict(made), delta, bound))


def noise_multiplier(
    epsilon: float,
    rounds: int,
    delta: float,
    *,
    sampling: Sampling = "known",
    clients: int | None = None,
    cohort: int | None = None,
) -> float:
    """Return the smallest noise multiplier that stays within ε over all rounds, to 0.1 %.

    >>> round(noise_multiplier(4.377, rounds=1, delta=1e-5), 2)
    1.0
    """
    require_epsilon(epsilon)
    require_delta(delta)
    whole_number("rounds", rounds, least=1)
    first = _release(1.0, sampling, clients, cohort)
    if sampling == "known":
        sigma = accounting_library().get_sigma_gaussian(epsilon, delta)
        return float(sigma) * math.sqrt(rounds)

    def enough(z: float) -> bool:
        return composed_epsilon({replace(first, noise_multiplier=z): rounds}, delta) <= epsilon

    return _search(enough)


def accounting_library() -> Any:
    """Return the module dp_accounting; raise an error that names the extra where it is missing."""
    return extra("dp_accounting", "privacy accounting", "dp-accounting", "privacy")


def _release(z: float, sampling: Sampling, clients: int | None, cohort: int | None) -> Release:
    if sampling not in ("fixed", "poisson"):
        return Release(z, sampling)
    require(
        clients is not None and cohort is not None and 1 <= cohort <= clients,
        f"{sampling} sampling needs the number of clients and a cohort of 1 to as many; "
        f"got {clients} and {cohort}",
    )
    return Release(z, sampling, clients or 1, cohort or 1)


def _renyi_epsilon(releases: Mapping[Release, int], delta: float) -> float:
    """Return ε by Rényi divergences, which add up over rounds."""
    total = [0.0] * len(ORDERS)
    for release, count in releases.items():
        total = [t + count * loss for t, loss in zip(total, _renyi(release), strict=True)]
    bound, _ = accounting_library().rdp.compute_epsilon(ORDERS, total, delta)
    return float(bound)


@lru_cache(maxsize=1024)
def _renyi(release: Release) -> list[float]:
    """Return the Rényi divergences of one release at `ORDERS`."""
    library = accounting_library()
    gaussian = library.GaussianDpEvent(release.unsampled)
    if release.sampling == "poisson":
        relation = library.NeighboringRelation.REPLACE_SPECIAL
        event = library.PoissonSampledDpEvent(release.probability, gaussian)
    else:  # the caller of the library must account for the sensitivity 2 of a replacement
        relation = library.NeighboringRelation.REPLACE_ONE
        event = library.SampledWithoutReplacementDpEvent(release.clients, release.cohort, gaussian)
    accountant = library.rdp.RdpAccountant(ORDERS, relation)
    accountant.compose(event)
    return list(accountant.rdp)


def _convolved_epsilon(releases: Mapping[Release, int], delta: float, bound: float) -> float:
    """Return ε by convolving the privacy losses of the rounds; `bound` is a known valid ε."""
    counts = Counter[tuple[float, float, bool]]()
    for release, count in _few_kinds(releases).items():
        counts[release.unsampled, release.probability, release.sampling == "fixed"] += count
    step = _grid_step(min(q / z for z, q, _ in counts), bound)
    total: Any = None
    for (z, q, replaced), count in counts.items():
        part = _losses(z, q, replaced, step).self_compose(count)
        total = part if total is None else total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=256)
def _losses(z: float, probability: float, replaced: bool, step: float) -> Any:
    """Return the privacy loss distribution of one release.

    Poisson sampling: N(0) mixed with N(1) against N(0), which is exact. A fixed cohort, one client
    replaced: amplification by sampling without replacement (Balle, Barthe and Gaboardi, 2018)
    bounds both orders of two neighbours by that profile at half the noise. N(0)
    mixed with N(1) against N(0) mixed with N(-1) dominates it: the latter has less mass than N(0)
    on every half-line on which the former exceeds a multiple of N(0), and the pair is symmetric.
    """
    library = accounting_library()
    relations = library.NeighboringRelation
    sampled = replaced and probability < 1.0  # with all clients: N(0) against N(1) either way
    return library.pld.privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=probability,
        value_discretization_interval=step,
        neighboring_relation=relations.REPLACE_ONE if sampled else relations.REPLACE_SPECIAL,
    )


def _grid_step(slope: float, bound: float) -> float:
    """Return a power of ten well below the loss of one round, with at most `MAX_STEPS` up to ε.

    Every step is valid: losses are rounded so that ε is not underestimated.
    """
    wanted = max(FINEST_STEP, min(1e-3, slope / 20), bound / MAX_STEPS)
    return float(10.0 ** math.floor(math.log10(wanted) + 1e-9))


def _few_kinds(releases: Mapping[Release, int]) -> Mapping[Release, int]:
    """Return releases with at most a few distinct probabilities, rounded up where needed.

    A client that is drawn more often is charged more, so rounding up is conservative.
    """
    if len(releases) <= MAX_KINDS:
        return releases
    scale, few = 10**6, Counter[Release]()
    for release, count in releases.items():
        power = math.ceil(math.log(release.probability) / math.log(COARSER) - 1e-12)
        cohort = min(scale, math.ceil(scale * COARSER**power))
        few[replace(release, clients=scale, cohort=cohort)] += count
    return few


def _search(enough: Callable[[float], bool], precision: float = 1e-3) -> float:
    """Return the smallest number for which `enough` holds, by bisection of its logarithm."""
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
    """Refuse a noise multiplier that is not positive and finite."""
    require(
        is_number(noise_multiplier) and noise_multiplier > 0,
        f"noise_multiplier must be positive, not {noise_multiplier!r}; leave privacy out for none",
    )


def require_epsilon(epsilon: float) -> None:
    """Refuse an ε that is not positive and finite."""
    require(
        is_number(epsilon) and epsilon > 0,
        f"epsilon must be positive and finite, not {epsilon!r}; leave privacy out for none",
    )


def require_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    valid = is_number(delta) and 0 < delta < 1
    require(valid, f"delta must be in (0, 1), not {delta!r}; 1e-5 is usual")
