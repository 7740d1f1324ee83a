"""Workers of one distribution: what FedExP's quotient measures, and how far a step can go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from tests.helpers.theory import ROUNDING, SEEDS, Array, examples, sq

DIM, STEPS, LR = 4000, 5, 0.5
DEVIATIONS = 5  # standard deviations of a sum of thousands of squares: nearly normal


def unclamped(updates: Array) -> tuple[float, float]:
    """Return FedExP's step size without its clamp and the quotient r."""
    rule, w = fx.ExP(eps=0.0, clamp=False), torch.zeros(updates.shape[1], dtype=torch.float64)
    _, _, metrics = rule.step(w, fx.Aggregate.of(updates), rule.init(w))
    return metrics["server_lr"].item(), metrics["diversity"].item()


def local_sgd(rng: np.random.Generator, curvature: Array, w: Array, noise: float) -> Array:
    """Return w minus the result of local SGD on Σ_j a_j w_j² / 2 with noise on every gradient."""
    local = w
    for _ in range(STEPS):
        local = local - LR * (curvature * local + noise * rng.normal(size=w.shape))
    return w - local


@examples(100)
@given(seed=SEEDS, workers=st.integers(2, 16), decades=st.floats(-2, 2))
def test_the_quotient_measures_signal_to_noise(seed: int, workers: int, decades: float) -> None:
    """r = (|g|² + s²) / (|g|² + s² / M), within the sampling variance of both sums.

    After τ steps Δ is normal: its mean is g_j = (1 - (1 - η a_j)^τ) w_j, and its variance
    c_j = η² σ² Σ_k (1 - η a_j)^2k. So ||Δ||² has the mean |g|² + s² with s² = Σ c_j, and the
    variance 2 Σ c_j² + 4 Σ c_j g_j²; that of ||Δ̄||² follows with c_j / M.
    """
    rng = np.random.default_rng(seed)
    curvature, w, noise = rng.uniform(0, 1, DIM), rng.normal(size=DIM), 10**decades
    updates = np.stack([local_sgd(rng, curvature, w, noise) for _ in range(workers)])
    keeps = 1 - LR * curvature
    g = (1 - keeps**STEPS) * w
    c = (LR * noise) ** 2 * np.stack([keeps ** (2 * k) for k in range(STEPS)]).sum(axis=0)

    def spread(c: Array) -> float:
        return DEVIATIONS * float(np.sqrt(2 * sq(c) + 4 * (c * g**2).sum()))

    numerator, width = sq(g) + c.sum(), spread(c) / workers**0.5
    denominator, other = sq(g) + c.sum() / workers, spread(c / workers)
    step, r = unclamped(updates)
    assert (numerator - width) / (denominator + other) <= r
    assert r <= (numerator + width) / (denominator - other)
    assert width < 0.15 * numerator
    assert other < 0.15 * denominator
    assert step == pytest.approx(r / 2, rel=ROUNDING, abs=0)


@examples(100)
@given(cosine=st.floats(-0.99, 1.0), scale=st.floats(1e-3, 1e3))
def test_of_two_workers_of_equal_norm_the_step_is_one_over_one_plus_the_cosine(
    cosine: float, scale: float
) -> None:
    updates = scale * np.array([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]])
    assert unclamped(updates)[0] == pytest.approx(1 / (1 + cosine), rel=100 * ROUNDING, abs=0)


@examples(100)
@given(seed=SEEDS, workers=st.integers(1, 16))
def test_the_step_is_at_most_half_the_workers_unless_updates_oppose_each_other(
    seed: int, workers: int
) -> None:
    """Updates without a negative entry have no negative products; orthogonal ones reach M / 2."""
    updates = np.random.default_rng(seed).exponential(size=(workers, 20)) ** 3
    assert 0.5 * (1 - ROUNDING) <= unclamped(updates)[0] <= workers / 2 * (1 + ROUNDING)
    orthogonal = np.eye(workers, 20)
    assert unclamped(orthogonal)[0] == pytest.approx(workers / 2, rel=ROUNDING, abs=0)
    assert unclamped(np.vstack([orthogonal[:1], -orthogonal[:1] / 2]))[0] > 1  # two that oppose
