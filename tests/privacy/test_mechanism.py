"""No client reaches further than the bound, and the noise is as loud as the account says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedexp.aggregate import Aggregate, norms
from fedexp.errors import UsageError
from fedexp.privacy import (
    CentralMechanism,
    LocalMechanism,
    best_norm_weight,
    clip,
    joint_sensitivity,
)


def central(**changes: Any) -> CentralMechanism:
    chosen: dict[str, Any] = {
        "clip": 2.0,
        "noise_multiplier": 0.5,
        "delta": 1e-5,
        "clients": 40,
        "cohort": 20,
        "norm_weight": 0.3,
        "noise_seed": 7,
    }
    return CentralMechanism(**{**chosen, **changes})


def sums_of(clients: int, sq_norm: float) -> Aggregate:
    """Updates that cancel each other, with this sum of squared norms."""
    zero = Aggregate.zero(1, torch.float64)
    size, total = (torch.tensor(float(x), dtype=torch.float64) for x in (clients, sq_norm))
    return replace(zero, weight=size, count=size, sq_norm=total)


def rows(count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@given(st.floats(1e-3, 1e3), st.floats(1e-6, 1e6), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_clipped_norm_never_exceeds_the_bound(bound: float, scale: float, seed: int) -> None:
    updates = scale * rows(3, 50, seed)
    clipped = clip(updates, bound)
    before, after = norms(updates), norms(clipped)
    assert (after <= bound).all()
    assert torch.allclose(after, before.clamp(max=bound), rtol=1e-6)
    assert torch.equal(clipped[before <= bound], updates[before <= bound])


def test_clipping_keeps_shape_type_direction_and_what_is_broken() -> None:
    one = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert torch.allclose(clip(one, 1.0), one / 5)
    assert clip(one, 1.0).dtype == torch.float64
    assert clip(torch.tensor([math.nan, 1.0]), 1.0).isnan().any()
    broken = Aggregate.of(clip(torch.tensor([[math.inf, 1.0], [0.0, 1.0]]), 1.0))
    assert (broken.count.item(), broken.dropped.item()) == (1.0, 1.0)


@given(st.floats(0.01, 10.0), st.floats(0.01, 3.0), st.floats(0.0, 1.0))
def test_the_joint_vector_stays_within_its_sensitivity(
    bound: float, kappa: float, part: float
) -> None:
    length = part * bound
    joint = math.hypot(length, kappa * length**2 / bound)
    assert joint <= joint_sensitivity(bound, kappa) * (1 + 1e-12)
    largest = math.hypot(bound, kappa * bound)
    assert joint_sensitivity(bound, kappa) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("size", [1e6, 2.0, 0.1, math.nan])
def test_one_client_moves_the_release_by_no_more_than_the_noise_is_made_for(size: float) -> None:
    """With and without a client, under the same noise, through the whole path of a round."""
    mechanism, others = central(), rows(9, 30, 1)
    guest = size * torch.ones(1, 30)
    without, having = (
        mechanism.release(Aggregate.of(mechanism.clipped(updates)), round=1)
        for updates in (others.double(), torch.cat([others, guest]).double())
    )
    moved = torch.linalg.vector_norm(having.update - without.update).item()
    scalar = (having.sq_norm - without.sq_norm).item() * mechanism.norm_weight / mechanism.clip
    assert math.hypot(moved, scalar) <= mechanism.sigma / mechanism.noise_multiplier
    assert (having.weight, having.count) == (without.weight, without.count)


def test_the_noise_has_the_promised_size_in_every_coordinate() -> None:
    """Seeded; bounds of four standard errors."""
    mechanism, still = central(), Aggregate.zero(20_000, torch.float64)
    assert mechanism.sigma == pytest.approx(0.5 * 2.0 * math.sqrt(1.09))
    noise = mechanism.release(still, round=1).update
    assert noise.std().item() == pytest.approx(mechanism.sigma, rel=4 / math.sqrt(40_000))
    assert abs(noise.mean().item()) < 4 * mechanism.sigma / math.sqrt(20_000)


def test_the_scalar_is_noised_by_its_own_share() -> None:
    """Seeded; over 2,000 rounds, far from both ends of its range."""
    mechanism = central(cohort=2000)
    middle = sums_of(2000, 4000)
    seen = torch.stack([mechanism.release(middle, k).sq_norm for k in range(2000)])
    deviation = mechanism.sigma * mechanism.clip / mechanism.norm_weight
    assert seen.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(4000))
    error = 4 * deviation / math.sqrt(2000)
    assert seen.mean().item() == pytest.approx(4000 - 2 * deviation, abs=error)


@pytest.mark.parametrize(("total", "end"), [(0.0, 0.0), (80.0, 80.0)])
def test_the_scalar_stays_where_squared_norms_can_be(total: float, end: float) -> None:
    """20 clients with a clip of 2: from 0 to 80; a negative one would turn momentum around."""
    sums = sums_of(20, total)
    seen = [central(norm_weight=0.01).release(sums, k).sq_norm.item() for k in range(400)]
    assert min(seen) >= 0
    assert max(seen) <= 80
    assert end in seen
    local = LocalMechanism(2.0, 0.5, 1e-5)
    assert local.release(replace(sums, sq_norm=sums.sq_norm * 0), 1).sq_norm == 0
    assert local.release(replace(sums, sq_norm=sums.sq_norm + 1e6), 1).sq_norm == 80


def test_the_margin_of_local_noise_by_hand() -> None:
    """d = 1, σ = 1, C = 2, 20 clients: 80 less 20 · 1, less 2 √(20 (2 + 4 · 2²))."""
    released = LocalMechanism(2.0, 0.5, 1e-5).release(sums_of(20, 80.0), 1)
    assert released.sq_norm.item() == pytest.approx(60 - 2 * math.sqrt(360))


def test_rounds_draw_noise_of_their_own() -> None:
    still = Aggregate.zero(8)
    first, second, again = (central().release(still, k).update for k in (1, 2, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_the_mean_is_over_the_fixed_cohort_whoever_arrives() -> None:
    few = Aggregate.of(torch.ones(5, 3, dtype=torch.float64))
    released = central(noise_multiplier=1e-9).release(few, 1)
    assert torch.allclose(released.mean, torch.full((3,), 0.25, dtype=torch.float64))
    assert released.mean_sq_norm.item() == pytest.approx(15 / 20, rel=1e-6)


def test_a_rule_that_reads_no_norms_gets_none() -> None:
    mechanism = central(norm_weight=0.0)
    assert mechanism.sigma == 1.0
    assert mechanism.release(Aggregate.of(rows(3, 4)), 1).sq_norm.isnan()


def test_the_best_weight_is_the_best() -> None:
    z, cohort = 1.3, 70

    def price(kappa: float) -> float:
        return (1 + kappa**2) * (1 + 16 * z**2 / (kappa * cohort) ** 2)

    best = best_norm_weight(z, cohort)
    assert all(price(best) < price(best * factor) for factor in (0.9, 0.99, 1.01, 1.1))


def test_extras_are_refused() -> None:
    carrying = Aggregate.of(rows(2, 3), extras={"control": rows(2, 3)})
    for mechanism in (central(), LocalMechanism(1.0, 1.0, 1e-5)):
        with pytest.raises(UsageError, match="carry control"):
            mechanism.release(carrying, 1)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_secret_cohorts_take_each_client_with_the_same_chance(sampling: Any) -> None:
    mechanism = central(sampling=sampling)  # 20 of 40
    plan = mechanism.plan(40, 20)
    cohorts = [mechanism.sample(40, plan, k) for k in range(500)]
    counts = torch.tensor([sum(k in (c or ()) for c in cohorts) for k in range(40)]) / 500
    assert (counts - 0.5).abs().max() < 4.5 * math.sqrt(0.25 / 500)
    sizes = {len(c or ()) for c in cohorts}
    assert sizes == {20} if sampling == "fixed" else len(sizes) > 5
    assert central().sample(40, plan, 1) is None
    unseeded = central(sampling=sampling, noise_seed=None, clients=1000)
    drawn = [unseeded.sample(1000, unseeded.plan(1000, 20), 1) for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("sampling", "clients", "wanted", "expected"),
    [
        ("known", 400, 200, (400, 20)),  # capped at the divisor
        ("known", 12, 6, (12, 6)),
        ("fixed", 400, 200, (400, 20)),
        ("fixed", 10, 15, (10, 10)),  # of all there are
        ("poisson", 400, 200, (400, 20)),  # more clients: 20 are expected still
        ("poisson", 10, 5, (40, 20)),  # fewer: nobody is drawn more often than planned
    ],
)
def test_a_round_is_planned_for_the_clients_there_are(
    sampling: Any, clients: int, wanted: int, expected: tuple[int, int]
) -> None:
    """The divisor is 20, and 40 clients were there at the start."""
    plan = central(sampling=sampling).plan(clients, wanted)
    assert (plan.clients, plan.cohort) == expected
    assert (plan.noise_multiplier, plan.sampling) == (0.5, sampling)


def test_metrics_tell_the_cost_and_the_share_of_noise() -> None:
    mechanism = central(noise_multiplier=5.0)
    released = mechanism.release(Aggregate.zero(5000), 3)
    plan = mechanism.plan(40, 20)
    metrics = mechanism.metrics({plan: 3}, released)
    assert metrics["delta"] == 1e-5
    assert metrics["epsilon"] > mechanism.metrics({plan: 2}, None)["epsilon"] > 0
    assert metrics["noise_share"] == pytest.approx(1.0, abs=0.1)
    quiet = central(noise_multiplier=0.01)
    moving = quiet.release(Aggregate.of(quiet.clipped(torch.ones(20, 50))), 1)
    expected = 50 * (quiet.sigma / 20) ** 2 / 4.0
    assert quiet.metrics({}, moving)["noise_share"] == pytest.approx(expected, rel=0.01)
