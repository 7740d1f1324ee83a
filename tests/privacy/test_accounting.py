"""(ε, δ) against formulas written out here, published figures, and pairs of real distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedexp.errors import UsageError
from fedexp.privacy import epsilon, noise_multiplier


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def delta_of_gaussian(z: float, eps: float) -> float:
    """Theorem 8 of Balle and Wang (2018), for sensitivity 1."""
    at = 1 / (2 * z)
    return normal_cdf(at - eps * z) - math.exp(eps) * normal_cdf(-at - eps * z)


@pytest.mark.parametrize(("z", "rounds"), [(0.5, 1), (1.0, 1), (4.0, 1), (2.0, 9), (30.0, 500)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_known_cohorts_cost_what_the_analytic_formula_says(
    z: float, rounds: int, delta: float
) -> None:
    """T releases with noise z are one with noise z / √T."""
    eps = epsilon(z, rounds, delta)
    assert delta_of_gaussian(z / math.sqrt(rounds), eps) == pytest.approx(delta, rel=1e-6)


def test_poisson_sampling_against_the_moments_accountant() -> None:
    """Abadi et al. (2016), sec. 3.2: q = 0.01, σ = 4, δ = 1e-5, 10⁴ steps give ε = 1.26.

    Later conversions are tighter; the exact value is bounded from below by the library's other
    accountant, which composes privacy loss distributions.
    """
    import dp_accounting as library

    ours = epsilon(4.0, 10_000, 1e-5, sampling="poisson", clients=100, cohort=1)
    exact = library.pld.PLDAccountant()
    exact.compose(library.PoissonSampledDpEvent(0.01, library.GaussianDpEvent(4.0)), 10_000)
    assert exact.get_epsilon(1e-5) < ours < 1.26


def hockey_stick(p: Any, q: Any, step: float, eps: float) -> float:
    """The δ for which two densities are (ε, δ)-close, by summing over a grid."""
    return float(np.maximum(p - math.exp(eps) * q, 0.0).sum() * step)


def delta_of_replacing(z: float, share: float, eps: float) -> float:
    """The client sends +1 or -1, all others 0, and takes part with probability `share`."""
    grid, step = np.linspace(-40 * z, 40 * z, 400_001, retstep=True)

    def density(centre: float) -> Any:
        return np.exp(-0.5 * ((grid - centre) / z) ** 2) / (z * math.sqrt(2 * math.pi))

    ours, theirs = ((1 - share) * density(0.0) + share * density(sent) for sent in (1.0, -1.0))
    return hockey_stick(ours, theirs, float(step), eps)


@pytest.mark.parametrize(("z", "clients", "cohort"), [(1.0, 20, 1), (1.5, 10, 5), (2.0, 10, 10)])
def test_fixed_cohorts_cover_replacing_a_client_by_its_opposite(
    z: float, clients: int, cohort: int
) -> None:
    """One round of a pair of neighbours, with the true distributions."""
    eps = epsilon(z, 1, 1e-4, sampling="fixed", clients=clients, cohort=cohort)
    assert delta_of_replacing(z, cohort / clients, eps) <= 1e-4 * (1 + 1e-6)


def test_forgetting_that_replacing_moves_the_sum_by_two_would_show() -> None:
    """The test above has teeth: with everyone taking part, the cost of z alone is too low."""
    assert delta_of_replacing(2.0, 1.0, epsilon(2.0, 1, 1e-4)) > 1e-3


def test_sampling_in_secret_costs_less() -> None:
    known = epsilon(2.0, 100, 1e-5)
    population: dict[str, Any] = {"clients": 10_000, "cohort": 100}
    fixed = epsilon(2.0, 100, 1e-5, sampling="fixed", **population)
    poisson = epsilon(2.0, 100, 1e-5, sampling="poisson", **population)
    assert poisson < fixed < known / 10


def test_when_all_take_part_there_is_nothing_to_gain() -> None:
    all_of_them: dict[str, Any] = {"clients": 10, "cohort": 10}
    assert epsilon(2.0, 3, 1e-5, sampling="poisson", **all_of_them) == epsilon(2.0, 3, 1e-5)
    assert epsilon(2.0, 3, 1e-5, sampling="fixed", **all_of_them) == epsilon(1.0, 3, 1e-5)


def test_it_grows_with_the_rounds_from_nothing() -> None:
    costs = [epsilon(1.0, rounds, 1e-5) for rounds in range(4)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))


@pytest.mark.parametrize("sampling", ["known", "poisson"])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_the_noise_for_an_epsilon_is_enough_and_no_more(sampling: Any, target: float) -> None:
    options: dict[str, Any] = {"sampling": sampling, "clients": 500, "cohort": 25}
    z = noise_multiplier(target, 50, 1e-5, **options)
    assert epsilon(z, 50, 1e-5, **options) <= target * (1 + 1e-9)
    assert epsilon(z * 0.997, 50, 1e-5, **options) > target


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: epsilon(0.0, 1, 1e-5), "leave privacy out"),
        (lambda: epsilon(math.nan, 1, 1e-5), "noise_multiplier must be positive"),
        (lambda: epsilon(1.0, -1, 1e-5), "rounds must not be negative"),
        (lambda: epsilon(1.0, 1, 0.0), "1e-5 is usual"),
        (lambda: epsilon(1.0, 1, 1.0), "1e-5 is usual"),
        (lambda: epsilon(1.0, 1, 1e-5, sampling="poisson"), "number of clients"),
        (lambda: epsilon(1.0, 1, 1e-5, sampling="fixed", clients=3, cohort=4), "got 3 and 4"),
        (lambda: epsilon(1.0, 1, 1e-5, sampling="odd"), "known, fixed, poisson"),  # type: ignore[arg-type]
        (lambda: noise_multiplier(math.inf, 1, 1e-5), "epsilon must be positive"),
        (lambda: noise_multiplier(1.0, 0, 1e-5), "rounds must be at least 1"),
    ],
)
def test_nonsense_is_refused_in_a_line(call: Any, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        call()
