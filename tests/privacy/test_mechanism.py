"""Mechanisms: sensitivity, the source of noise, and the step size under noise."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
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
    normals,
    seeded_normals,
    system_normals,
)
from fedexp.server import ExP, exp_step_size

DRAWS = 100_000
CLIENTS, CLIP = 1000, 1.0


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


def test_clipping_preserves_shape_type_direction_and_nan() -> None:
    one = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert torch.allclose(clip(one, 1.0), one / 5)
    assert clip(one, 1.0).dtype == torch.float64
    assert clip(torch.tensor([math.nan, 1.0]), 1.0).isnan().any()
    broken = Aggregate.of(clip(torch.tensor([[math.inf, 1.0], [0.0, 1.0]]), 1.0))
    assert (broken.count.item(), broken.dropped.item()) == (1.0, 1.0)


@given(st.floats(0.01, 10.0), st.floats(0.01, 3.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_the_joint_vector_stays_within_its_sensitivity(
    bound: float, kappa: float, beta: float, part: float
) -> None:
    length = part * bound
    joint = math.hypot(length, kappa * length**2 / bound, beta * bound)
    assert joint <= joint_sensitivity(bound, kappa, beta) * (1 + 1e-12)
    largest = math.hypot(bound, kappa * bound, beta * bound)
    assert joint_sensitivity(bound, kappa, beta) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("numerator", ["lower-bound", "unbiased"])
@pytest.mark.parametrize("size", [1e6, 2.0, 0.1, math.nan])
def test_one_client_moves_the_release_by_no_more_than_the_noise_is_made_for(
    size: float, numerator: str, bound: float | None
) -> None:
    """With and without a client, under the same noise, through the whole path of a round."""
    mechanism, others = central(numerator=numerator, bound=bound), rows(9, 30, 1)
    guest = size * torch.ones(1, 30)
    without, having = (
        mechanism.release(
            Aggregate.of(mechanism.clipped(updates), None, mechanism.bits(updates)), round=1
        )
        for updates in (others.double(), torch.cat([others, guest]).double())
    )
    moved = torch.linalg.vector_norm(having.update - without.update).item()
    scalar = (having.sq_norm - without.sq_norm).item() * mechanism.norm_weight / mechanism.clip
    bit = 0.0
    if bound is not None:  # the released median is m exp(0.1 x mean bit)
        ratio = having.extras["median of Δ"] / without.extras["median of Δ"]
        bit = mechanism.bit_weight * mechanism.clip * ratio.log().item() / 0.1 * mechanism.cohort
    assert math.hypot(moved, scalar, bit) <= mechanism.sigma / mechanism.noise_multiplier
    assert (having.weight, having.count) == (without.weight, without.count)


def test_the_bits_are_noised_by_their_own_share() -> None:
    """Seeded; over 2,000 rounds, 1,200 of 2,000 clients longer than the median of 1."""
    mechanism = central(cohort=2000, bound=2.0, noise_multiplier=5.0)
    deltas = torch.cat([torch.full((1200, 1), 1.1), torch.full((800, 1), 0.9)]).double()
    sums = Aggregate.of(mechanism.clipped(deltas), None, mechanism.bits(deltas))
    medians = [mechanism.release(sums, k).extras["median of Δ"] for k in range(2000)]
    seen = torch.stack(medians).log() / 0.1
    deviation = mechanism.sigma / (mechanism.bit_weight * mechanism.clip * 2000)
    assert 0.01 < deviation < 0.2
    assert seen.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(4000))
    assert seen.mean().item() == pytest.approx(0.2, abs=4 * deviation / math.sqrt(2000))


def test_a_bound_of_which_nobody_replied_has_a_median_too() -> None:
    released = central(bound=2.0).release(Aggregate.zero(3, torch.float64), round=1)
    assert math.exp(-0.1) < released.extras["median of Δ"].item() < math.exp(0.1)


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


def test_the_central_estimate_is_unbiased() -> None:
    """Seeded; four standard errors over 2,000 rounds, far from both ends of the range."""
    mechanism, middle = central(cohort=2000, numerator="unbiased"), sums_of(2000, 4000)
    seen = torch.stack([mechanism.release(middle, k).sq_norm for k in range(2000)])
    deviation = mechanism.sigma * mechanism.clip / mechanism.norm_weight
    assert seen.mean().item() == pytest.approx(4000, abs=4 * deviation / math.sqrt(2000))


def test_the_local_estimate_is_unbiased() -> None:
    """Seeded; the mean over 500 rounds of noised updates is that of the clipped ones."""
    mechanism = LocalMechanism(2.0, 0.1, 1e-5, numerator="unbiased")
    updates = clip(0.2 * rows(20, 30, 3).double(), 2.0)
    truth, seen = updates.square().sum().item(), []
    for k in range(500):
        sent = torch.stack(
            [mechanism.noised(u, seeded_normals(0, k, i)) for i, u in enumerate(updates)]
        )
        seen.append(mechanism.release(Aggregate.of(sent), k).sq_norm.item())
    assert 0 < min(seen) < max(seen) < 80  # nothing was clamped
    sigma = mechanism.sigma
    deviation = math.sqrt(20 * 2 * 30 * sigma**4 + 4 * sigma**2 * truth)
    assert np.mean(seen) == pytest.approx(truth, abs=4 * deviation / math.sqrt(500))


def test_the_numerator_changes_neither_the_noise_nor_the_cost() -> None:
    sums = Aggregate.of(0.2 * rows(20, 30).double())
    one, other = central(), central(numerator="unbiased")
    assert torch.equal(one.release(sums, 1).update, other.release(sums, 1).update)
    assert one.sigma == other.sigma
    assert one.plan(40, 20) == other.plan(40, 20)
    local = LocalMechanism(2.0, 0.1, 1e-5), LocalMechanism(2.0, 0.1, 1e-5, numerator="unbiased")
    assert local[0].plan(40, 20) == local[1].plan(40, 20)
    assert local[0].config() == local[1].config()
    assert local[0].release(sums, 1).sq_norm < local[1].release(sums, 1).sq_norm


def test_rounds_draw_noise_of_their_own() -> None:
    still = Aggregate.zero(8)
    first, second, again = (central().release(still, k).update for k in (1, 2, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_the_mean_is_over_the_fixed_cohort_size() -> None:
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
        with pytest.raises(UsageError, match="include control"):
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
        ("fixed", 10, 15, (10, 10)),  # of all clients
        ("poisson", 400, 200, (400, 20)),  # more clients: 20 are expected still
        ("poisson", 10, 5, (40, 20)),  # fewer: no client is drawn more often than planned
    ],
)
def test_a_round_is_planned_for_the_clients_there_are(
    sampling: Any, clients: int, wanted: int, expected: tuple[int, int]
) -> None:
    """The divisor is 20, and 40 clients were there at the start."""
    plan = central(sampling=sampling).plan(clients, wanted)
    assert (plan.clients, plan.cohort) == expected
    assert (plan.noise_multiplier, plan.sampling) == (0.5, sampling)


def test_metrics_have_the_cost_and_the_share_of_noise() -> None:
    mechanism = central(noise_multiplier=5.0)
    released = mechanism.release(Aggregate.zero(5000), 3)
    plan = mechanism.plan(40, 20)
    metrics = mechanism.metrics({plan: 3}, released)
    assert metrics["delta"] == 1e-5
    assert metrics["epsilon"] > mechanism.metrics({plan: 2}, None)["epsilon"] > 0
    assert metrics["noise_share"] == pytest.approx(1.0, abs=0.1)
    exact = central(noise_multiplier=0.01)
    moving = exact.release(Aggregate.of(exact.clipped(torch.ones(20, 50))), 1)
    expected = 50 * (exact.sigma / 20) ** 2 / 4.0
    assert exact.metrics({}, moving)["noise_share"] == pytest.approx(expected, rel=0.01)


def test_the_systems_normals_are_normal() -> None:
    """Five standard errors each: all four fail by chance less than once in 10⁵ runs."""
    drawn = system_normals(DRAWS)
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        error = math.sqrt(spread / DRAWS)
        assert abs((drawn**power).mean().item() - moment) < 5 * error
    inside = (drawn.abs() < 1.0).double().mean().item()
    assert inside == pytest.approx(math.erf(math.sqrt(0.5)), abs=5 * math.sqrt(0.22 / DRAWS))


def test_pairs_of_a_draw_are_not_correlated() -> None:
    drawn = system_normals(DRAWS)
    half = DRAWS // 2
    assert abs((drawn[:half] * drawn[half:]).mean().item()) < 5 / math.sqrt(half)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_number_of_draws(count: int) -> None:
    assert system_normals(count).shape == (count,)
    assert normals(3, 1)(count).dtype == torch.float64


def test_no_seed_repeats_the_systems_noise() -> None:
    def release() -> Aggregate:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        mechanism = CentralMechanism(1.0, 1.0, 1e-5, 10, 10, norm_weight=0.5)
        return mechanism.release(Aggregate.of(torch.zeros(10, 4)), round=1)

    assert not torch.equal(release().update, release().update)


def test_all_of_it_comes_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def same(count: int) -> bytes:
        requested.append(count)
        return bytes(range(count))

    monkeypatch.setattr(os, "urandom", same)
    first = system_normals(4)
    assert torch.equal(first, system_normals(4))
    assert requested == [32, 32]


def test_seeded_noise_differs_between_rounds_and_clients() -> None:
    streams = [seeded_normals(0, *numbers)(3) for numbers in [(1,), (2,), (1, 7), (1, 8)]]
    assert len({tuple(stream.tolist()) for stream in streams}) == 4
    assert torch.equal(seeded_normals(0, 1)(3), streams[0])


def updates(dim: int, diversity: float, length: float) -> Tensor:
    """Of the same length, with mean ||Δ_i||² / ||Δ̄||² near `diversity`."""
    raw = torch.randn(CLIENTS, dim, generator=torch.Generator().manual_seed(0))
    own = raw / raw.norm(dim=1, keepdim=True)
    common = torch.zeros(dim)
    common[0] = 1.0
    mixed = math.sqrt(1 / diversity) * common + math.sqrt(1 - 1 / diversity) * own
    return (length * mixed / mixed.norm(dim=1, keepdim=True)).double()


def step_size(aggregate: Aggregate) -> float:
    rule, start = ExP(eps=0.0), torch.zeros(len(aggregate.update), dtype=torch.float64)
    return float(rule.step(start, aggregate, rule.init(start))[2]["server_lr"])


def noised(rows: Tensor, sigma: float, seed: int) -> Aggregate:
    """The sums of updates that carry noise of their own."""
    noise = seeded_normals(seed, 0)(rows.numel()).view_as(rows)
    return Aggregate.of(rows + sigma * noise)


def summary(etas: list[float]) -> tuple[float, float]:
    drawn = torch.tensor(etas, dtype=torch.float64)
    return drawn.mean().item(), drawn.std().item() / math.sqrt(len(etas))


def test_central_noise_leaves_the_step_size_where_it_was() -> None:
    rows, dim = updates(2500, diversity=10.0, length=0.5), 2500
    total = Aggregate.of(rows)
    mechanisms = [
        CentralMechanism(
            CLIP, 1.0, 1e-5, CLIENTS, CLIENTS, best_norm_weight(1.0, CLIENTS), noise_seed=k
        )
        for k in range(200)
    ]
    exact, sigma = step_size(total), mechanisms[0].sigma
    ours, error = summary([step_size(m.release(total, 1)) for m in mechanisms])
    naive = step_size(
        noised(rows, sigma / math.sqrt(CLIENTS), seed=0)
    )  # the same noise, shared out
    assert exact == pytest.approx(5.0, rel=0.05)
    assert naive > 8 * exact
    assert 0.7 * exact < ours < exact
    # and it is the formula of docs/privacy.md, within four standard errors
    margin = 2 * sigma * CLIP / mechanisms[0].norm_weight / CLIENTS
    travelled = float(total.sq_norm_of_mean) + dim * (sigma / CLIENTS) ** 2
    stated = exp_step_size(float(total.mean_sq_norm) - margin, travelled)
    assert ours == pytest.approx(stated, abs=4 * error)


def test_local_noise_leaves_the_step_size_where_it_was() -> None:
    rows, dim = updates(1000, diversity=8.0, length=0.9), 1000
    mechanism = LocalMechanism(CLIP, 0.1414, 1e-5)
    sigma = mechanism.sigma
    sums = [noised(clip(rows, CLIP), sigma, seed=k) for k in range(30)]
    exact, naive = step_size(Aggregate.of(rows)), step_size(sums[0])
    ours, error = summary([step_size(mechanism.release(each, 1)) for each in sums])
    assert exact == pytest.approx(4.0, rel=0.05)
    assert naive > 15 * exact
    assert 0.7 * exact < ours < exact
    margin = 2 * sigma * math.sqrt((2 * dim * sigma**2 + 4 * CLIP**2) / CLIENTS)
    travelled = float(Aggregate.of(rows).sq_norm_of_mean) + dim * sigma**2 / CLIENTS
    assert ours == pytest.approx(exp_step_size(0.81 - margin, travelled), abs=4 * error)


def test_noise_alone_is_hardly_ever_stepped_along() -> None:
    """Near the optimum sums are noise: naive ones extrapolate it, ours in 2.3 % of rounds at most.

    That is how often a normal number exceeds the margin of two standard deviations.
    """
    rows, draws = 1e-3 * updates(400, diversity=8.0, length=1.0), 2000
    local = LocalMechanism(CLIP, 1.0, 1e-5)
    kappa = best_norm_weight(1.0, CLIENTS)
    central = CentralMechanism(CLIP, 1.0, 1e-5, CLIENTS, CLIENTS, kappa, noise_seed=0)
    total, replies = Aggregate.of(rows), noised(rows, local.sigma, seed=1)
    assert step_size(replies) > 100
    assert step_size(local.release(replies, 1)) == 1.0
    exceeding = sum(step_size(central.release(total, k)) > 1 for k in range(draws)) / draws
    allowed = 0.5 * math.erfc(math.sqrt(2.0))
    assert exceeding < allowed + 3 * math.sqrt(allowed / draws)


def test_training_with_noise_is_no_worse_than_averaging_and_better_where_it_is_quiet() -> None:
    """Clients that project onto hyperplanes of their own; 40 rounds, three seeds of noise."""
    faces = torch.randn(50, 400, generator=torch.Generator().manual_seed(3)).double()
    faces /= faces.norm(dim=1, keepdim=True)
    optimum = torch.ones(400, dtype=torch.float64) / 20
    bound = 0.2

    def distance(extrapolate: bool, z: float, seed: int) -> float:
        kappa = best_norm_weight(z, 50)
        mechanism = CentralMechanism(bound, z, 1e-5, 50, 50, kappa, noise_seed=seed)
        w = torch.zeros(400, dtype=torch.float64)
        for k in range(40):
            deltas = (faces @ (w - optimum))[:, None] * faces
            released = mechanism.release(Aggregate.of(mechanism.clipped(deltas)), k)
            w = w - (step_size(released) if extrapolate else 1.0) * released.mean
        return (faces @ (w - optimum)).norm().item()

    def mean_distance(extrapolate: bool, z: float) -> float:
        return sum(distance(extrapolate, z, seed) for seed in range(3)) / 3

    assert mean_distance(True, z=0.01) < 0.5 * mean_distance(False, z=0.01)
    assert mean_distance(True, z=3.0) <= 1.01 * mean_distance(False, z=3.0)
