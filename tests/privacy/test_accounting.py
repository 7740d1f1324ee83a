"""(ε, δ) against formulas written out here, published figures, and pairs of real distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedexp.errors import UsageError
from fedexp.privacy import (
    BudgetSpentError,
    Ledger,
    Release,
    composed_epsilon,
    epsilon,
    noise_multiplier,
)


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def delta_of_gaussian(z: float, eps: float) -> float:
    """Theorem 8 of Balle and Wang (2018), for sensitivity 1."""
    at = 1 / (2 * z)
    return normal_cdf(at - eps * z) - math.exp(eps) * normal_cdf(-at - eps * z)


@pytest.mark.parametrize(("z", "rounds"), [(0.5, 1), (1.0, 1), (4.0, 1), (2.0, 9), (30.0, 500)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_known_cohorts_cost_as_in_the_analytic_formula(z: float, rounds: int, delta: float) -> None:
    """T releases with noise z are one with noise z / √T."""
    eps = epsilon(z, rounds, delta)
    assert delta_of_gaussian(z / math.sqrt(rounds), eps) == pytest.approx(delta, rel=1e-6)


def test_poisson_sampling_against_the_moments_accountant() -> None:
    """Abadi et al. (2016), sec. 3.2: q = 0.01, σ = 4, δ = 1e-5, 10⁴ steps give ε = 1.26.

    Rényi accounting gives 1.04, and the true value, by the convolution below, is 0.947.
    """
    ours = epsilon(4.0, 10_000, 1e-5, sampling="poisson", clients=100, cohort=1)
    true = convolved(*poisson_pair(4.0, 0.01), 10_000, 1e-5, step=2e-5, reach=10.0)
    assert true == pytest.approx(0.947, abs=1e-3)
    assert true * (1 - 1e-3) < ours < true * 1.002


Masses = NDArray[np.float64]


def normal_masses(z: float, *centres: float) -> list[Masses]:
    """N(centre, z²) on a common fine grid, as masses."""
    grid, step = np.linspace(-15 * z, 15 * z, 200_001, retstep=True)
    scale = float(step) / (z * math.sqrt(2 * math.pi))
    return [scale * np.exp(-0.5 * ((grid - centre) / z) ** 2) for centre in centres]


def poisson_pair(z: float, share: float) -> tuple[Masses, Masses]:
    """What is released with a client and without it, where it is drawn with this probability."""
    without, present = normal_masses(z, 0.0, 1.0)
    return (1 - share) * without + share * present, without


def convolved(
    p: Masses, q: Masses, rounds: int, delta: float, step: float = 5e-4, reach: float = 60.0
) -> float:
    """ε of p against q over so many rounds: losses on a grid, rounded to the nearest step."""
    size = round(2 * reach / step)
    at = np.rint(np.log(p / q) / step).astype(int) % size
    losses = np.bincount(at, weights=p, minlength=size)
    sums = np.fft.irfft(np.fft.rfft(losses) ** rounds, size)
    values = np.fft.fftfreq(size, 1 / size) * step

    def delta_of(eps: float) -> float:
        above = values > eps
        return float((sums[above] * -np.expm1(eps - values[above])).sum())

    low, high = 0.0, reach
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def test_poisson_cost_is_the_true_one_if_empty_cohorts_are_noised() -> None:
    """N = 10, M = 1, z = 2, 200 rounds: 3.36, but 7.1 if a round without clients shows itself.

    With nine other clients an empty cohort has probability 0.9^9, or 0.9^10 where the tenth is one
    of them. A model that stays as it is in such rounds is an outcome of its own.
    """
    ours = epsilon(2.0, 200, 1e-5, sampling="poisson", clients=10, cohort=1)
    present, absent = poisson_pair(2.0, 0.1)
    assert ours == pytest.approx(convolved(present, absent, 200, 1e-5), rel=1e-3)
    empty = 0.9**9
    shown = np.append(present - 0.9 * empty * absent, 0.9 * empty)
    seen = convolved(shown, np.append((1 - empty) * absent, empty), 200, 1e-5)
    assert seen == pytest.approx(7.1, abs=0.05)


def test_unequal_rounds_cost_what_their_true_distributions_do() -> None:
    """30 rounds of coins with q = 0.2 and 30 with q = 0.05, against one convolution of pairs."""
    releases = {Release(2.0, "poisson", 10, 2): 30, Release(2.0, "poisson", 40, 2): 30}
    ours = composed_epsilon(releases, 1e-5)
    equal = [composed_epsilon({release: 60}, 1e-5) for release in releases]
    assert min(equal) < ours < max(equal)
    (frequent, absent), (rare, _) = poisson_pair(2.0, 0.2), poisson_pair(2.0, 0.05)
    step, size = 5e-4, 240_000
    spectrum = np.ones(size // 2 + 1, complex)
    for pair in (frequent, rare):
        at = np.rint(np.log(pair / absent) / step).astype(int) % size
        spectrum *= np.fft.rfft(np.bincount(at, weights=pair, minlength=size)) ** 30
    sums, values = np.fft.irfft(spectrum, size), np.fft.fftfreq(size, 1 / size) * step
    above = values > ours
    delta = float((sums[above] * -np.expm1(ours - values[above])).sum())
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_rounds_in_which_all_take_part_cost_in_full() -> None:
    """One round of 10 among 100 clients, then 19 of 10 among 10: nearly 20 rounds of all."""
    shrunk = {Release(1.0, "fixed", 100, 10): 1, Release(1.0, "fixed", 10, 10): 19}
    spent = composed_epsilon(shrunk, 1e-5)
    assert epsilon(0.5, 19, 1e-5) < spent < epsilon(0.5, 20, 1e-5)
    assert spent == pytest.approx(74.4, abs=0.3)


@pytest.mark.parametrize(("clients", "cohort"), [(20, 1), (20, 5), (20, 15)])
def test_many_fixed_cohorts_cover_the_bound_of_their_theorem(clients: int, cohort: int) -> None:
    """20 rounds against N(0) mixed with N(1) over N(0), at z / 2: δ' = q δ (Balle et al., 2018)."""
    ours = epsilon(2.0, 20, 1e-5, sampling="fixed", clients=clients, cohort=cohort)
    share, eps = cohort / clients, 1.5
    present, absent = poisson_pair(1.0, share)
    amplified = share * delta_of_gaussian(1.0, eps)
    after = math.log1p(share * math.expm1(eps))
    assert hockey_stick(present, absent, 1.0, after) == pytest.approx(amplified, rel=1e-4)
    assert ours > convolved(present, absent, 20, 1e-5) * (1 - 1e-3)


def test_many_kinds_of_rounds_cost_a_little_more_at_most() -> None:
    """Federations of 40 sizes: probabilities are rounded up, by a twentieth at most."""
    releases = {Release(2.0, "poisson", size, 20): 2 for size in range(200, 280, 2)}
    dearest = epsilon(2.0, 80, 1e-5, sampling="poisson", clients=200, cohort=20)
    cheapest = epsilon(2.0, 80, 1e-5, sampling="poisson", clients=279, cohort=20)
    middle = composed_epsilon({Release(2.0, "poisson", 237, 20): 80}, 1e-5)
    spent = composed_epsilon(releases, 1e-5)
    assert cheapest < middle < spent < min(dearest, 1.05 * middle)


def test_convolved_losses_are_tighter_than_renyi_divergences() -> None:
    """z = 1, 50 of 1,000 clients, 200 rounds: Rényi accounting alone gives 5.37 and 58.4."""
    options: dict[str, Any] = {"clients": 1000, "cohort": 50}
    assert epsilon(1.0, 200, 1e-5, sampling="poisson", **options) == pytest.approx(4.77, abs=0.01)
    assert epsilon(1.0, 200, 1e-5, sampling="fixed", **options) == pytest.approx(28.6, abs=0.1)


def test_a_ledger_writes_before_it_counts_and_refuses_what_is_too_much() -> None:
    written: list[int] = []
    ledger = Ledger({Release(2.0): 2}, lambda after: written.append(sum(after.values())))
    ledger.charge(Release(2.0))
    assert (ledger.count, written) == (3, [3])
    assert ledger.epsilon(1e-5) == pytest.approx(epsilon(2.0, 3, 1e-5))
    ledger.require_room(Release(2.0), epsilon(2.0, 4, 1e-5), 1e-5)
    with pytest.raises(BudgetSpentError, match="3 releases were charged"):
        ledger.require_room(Release(1.9), epsilon(2.0, 4, 1e-5), 1e-5)

    def full(after: Any) -> None:
        raise UsageError("no room")

    broken = Ledger(save=full)
    with pytest.raises(UsageError, match="no room"):
        broken.charge(Release(2.0))
    assert broken.count == 0


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


def test_ignoring_the_sensitivity_of_a_replacement_would_fail() -> None:
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
        (lambda: Release(1.0, "fixed", 3, 4), "cohort of 4 cannot be drawn from 3"),
        (lambda: composed_epsilon({Release(1.0): 1, Release(1.0, "fixed", 2): 1}, 1e-5), "mix"),
        (lambda: noise_multiplier(math.inf, 1, 1e-5), "epsilon must be positive"),
        (lambda: noise_multiplier(1.0, 0, 1e-5), "rounds must be at least 1"),
    ],
)
def test_invalid_values_are_refused_in_a_line(call: Any, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        call()
