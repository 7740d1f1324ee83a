"""η_g under noise: close to the one without where naive sums are far off, and safe elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.privacy import CentralMechanism, LocalMechanism, best_norm_weight, clip, seeded_normals
from fedexp.server import ExP, exp_step_size

CLIENTS, CLIP = 1000, 1.0


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
    quiet, sigma = step_size(total), mechanisms[0].sigma
    ours, error = summary([step_size(m.release(total, 1)) for m in mechanisms])
    naive = step_size(
        noised(rows, sigma / math.sqrt(CLIENTS), seed=0)
    )  # the same noise, shared out
    assert quiet == pytest.approx(5.0, rel=0.05)
    assert naive > 8 * quiet
    assert 0.7 * quiet < ours < quiet
    # and it is what docs/privacy.md says, within four standard errors
    margin = 2 * sigma * CLIP / mechanisms[0].norm_weight / CLIENTS
    travelled = float(total.sq_norm_of_mean) + dim * (sigma / CLIENTS) ** 2
    stated = exp_step_size(float(total.mean_sq_norm) - margin, travelled)
    assert ours == pytest.approx(stated, abs=4 * error)


def test_local_noise_leaves_the_step_size_where_it_was() -> None:
    rows, dim = updates(1000, diversity=8.0, length=0.9), 1000
    mechanism = LocalMechanism(CLIP, 0.1414, 1e-5)
    sigma = mechanism.sigma
    sums = [noised(clip(rows, CLIP), sigma, seed=k) for k in range(30)]
    quiet, naive = step_size(Aggregate.of(rows)), step_size(sums[0])
    ours, error = summary([step_size(mechanism.release(each, 1)) for each in sums])
    assert quiet == pytest.approx(4.0, rel=0.05)
    assert naive > 15 * quiet
    assert 0.7 * quiet < ours < quiet
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
