"""The step size as a number: its bounds, its special cases, its symmetries, and the role of eps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from tests.helpers.theory import (
    EPS,
    ROUNDING,
    SEEDS,
    Array,
    deltas,
    examples,
    mean_sq,
    run,
    shared_optimum,
    sq,
)


def draw_updates(seed: int) -> Array:
    """Updates of up to 8 clients around a common mean, from nearly equal to nearly opposed."""
    rng = np.random.default_rng(seed)
    clients, dim = rng.integers(1, 9), rng.integers(1, 30)
    spread = 10 ** rng.uniform(-1, 1)
    updates: Array = rng.normal(size=dim) + spread * rng.normal(size=(clients, dim))
    return updates


def step_size(updates: Array, eps: float = 0.0, **options: float | bool) -> float:
    """η_g as the server rule takes it."""
    rule, w = fx.ExP(eps=eps, **options), torch.zeros(updates.shape[1], dtype=torch.float64)  # type: ignore[arg-type]
    _, _, metrics = rule.step(w, fx.Aggregate.of(updates), rule.init(w))
    return float(metrics["server_lr"])


def ratio(updates: Array) -> float:
    """r = sum ||Δ_i||² / (M ||Δ̄||²)."""
    return mean_sq(updates) / sq(updates.mean(axis=0))


def close(value: float, scale: float = 1.0) -> object:
    """Equal up to rounding; `scale` = √r where Δ̄ comes out of a cancellation."""
    return pytest.approx(value, rel=ROUNDING * scale, abs=0)


@examples(200)
@given(seed=SEEDS, eps=EPS)
def test_formula(seed: int, eps: float) -> None:
    """P1, eq. 8: η_g = max(1, sum ||Δ_i||² / (2M (||Δ̄||² + eps))), and the model moves by η_g Δ̄."""
    updates = draw_updates(seed)
    mean = updates.mean(axis=0)
    eta = max(1.0, mean_sq(updates) / (2 * (sq(mean) + eps)))
    rule, w = fx.ExP(eps=eps), torch.ones(len(mean), dtype=torch.float64)
    moved, _, metrics = rule.step(w, fx.Aggregate.of(updates), rule.init(w))
    assert float(metrics["server_lr"]) == close(eta, ratio(updates) ** 0.5)
    # The mean itself carries the rounding of the largest update, η_g times over.
    tolerance = ROUNDING * eta * np.abs(updates).max() + ROUNDING
    np.testing.assert_allclose(moved.numpy(), 1 - eta * mean, rtol=0, atol=tolerance)


@examples(200)
@given(seed=SEEDS, eps=EPS)
def test_between_fedavg_and_the_ratio(seed: int, eps: float) -> None:
    """P1, Lemma 2 (Jensen): 1 <= η_g <= r, what both theorems need; EPPM's ratio is r >= 1."""
    updates = draw_updates(seed)
    r = ratio(updates)
    assert r >= 1 - ROUNDING
    assert 1 <= step_size(updates, eps) <= max(1.0, r * (1 + ROUNDING * r**0.5))
    eppm = step_size(updates, factor=1.0, clamp=False)
    assert eppm >= 1 - ROUNDING
    assert eppm == close(r, r**0.5)


@examples(100)
@given(seed=SEEDS)
def test_weighted_between_fedavg_and_the_ratio(seed: int) -> None:
    """P1 with weights p_i: numerator and mean use the same ones, so 1 <= η_g <= r still holds."""
    updates = draw_updates(seed)
    p = np.random.default_rng(seed).uniform(0.1, 10, size=len(updates))
    p /= p.sum()
    mean = (p[:, None] * updates).sum(axis=0)
    r = sum(float(weight) * sq(row) for weight, row in zip(p, updates, strict=True)) / sq(mean)
    aggregate = fx.Aggregate.of(updates, 7 * p)  # only their proportions count
    eta = fx.exp_step_size(aggregate.mean_sq_norm, aggregate.sq_norm_of_mean)
    assert float(eta) == close(max(1.0, r / 2), r**0.5)
    assert r >= 1 - ROUNDING


@examples(50)
@given(seed=SEEDS, clients=st.integers(1, 9))
def test_special_cases(seed: int, clients: int) -> None:
    """P1: one client and equal clients give 1; orthogonal ones of equal norm r = M, η_g = M/2."""
    rng = np.random.default_rng(seed)
    one = rng.normal(size=(1, 12))
    assert step_size(one) == 1
    assert step_size(np.repeat(one, clients, axis=0)) == 1
    orthogonal = 3 * np.linalg.qr(rng.normal(size=(12, 12)))[0][:clients]
    assert step_size(orthogonal, factor=1.0) == close(clients)
    assert step_size(orthogonal) == close(max(1.0, clients / 2))
    at_rest = np.concatenate([np.zeros_like(one), one])
    assert step_size(at_rest, factor=1.0) == close(2.0)
    assert step_size(at_rest) == close(1.0)


@examples(100)
@given(seed=SEEDS)
def test_similar_clients_average(seed: int) -> None:
    """P1: η_g is exactly 1 when r <= 2, so clients that agree run FedAvg; else it is r/2."""
    updates = draw_updates(seed)
    r = ratio(updates)
    eta = step_size(updates)
    assert eta == (1 if r <= 2 else close(r / 2, r**0.5))


@examples(40)
@given(seed=SEEDS, lr=st.floats(1e-3, 0.1), other=st.floats(1e-3, 0.1))
def test_gradient_diversity(seed: int, lr: float, other: float) -> None:
    """P14, sec. 3.3: one local step gives sum ||∇F_i||² / (2M ||∇F||²), whatever η_l is."""
    problem = shared_optimum(seed)
    gradients = problem.gradients(problem.start)
    diversity = max(1.0, ratio(gradients) / 2)
    etas = [run(problem, fx.fedexp(eps=0.0), 1, size, 1).steps[0] for size in (lr, other)]
    # Δ_i = w - (w - η_l ∇F_i) loses digits where the step is short beside the model.
    lost = np.abs(problem.start).max() / (min(lr, other) * sq(gradients.mean(axis=0)) ** 0.5)
    tolerance = ROUNDING * (lost + 1) * ratio(gradients) ** 0.5
    assert etas == pytest.approx([diversity] * 2, rel=tolerance, abs=0)


@examples(100)
@given(seed=SEEDS, scale=st.floats(1e-3, 1e3))
def test_scale_and_rotation(seed: int, scale: float) -> None:
    """P14: at eps = 0 neither the unit nor the axes of the model matter."""
    updates = draw_updates(seed)
    r, dim = ratio(updates), updates.shape[1]
    turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0]
    eta = step_size(updates)
    assert step_size(updates * scale) == close(eta, r**0.5)
    assert step_size(updates @ turn) == close(eta, r**0.5)
    assert step_size(updates * 2.0**20) == eta  # a power of two rounds nothing


@examples(100)
@given(seed=SEEDS, eps=st.floats(1e-3, 1.0), scale=st.floats(1.5, 10.0))
def test_eps_sets_a_scale(seed: int, eps: float, scale: float) -> None:
    """P14: with eps > 0 larger updates step further, unless eps is relative."""
    updates = draw_updates(seed)
    options = {"eps": eps, "clamp": False}
    assert step_size(updates * scale, **options) > step_size(updates, **options)
    relative = [step_size(u, eps_mode="relative", **options) for u in (updates, updates * scale)]  # type: ignore[arg-type]
    assert relative[1] == close(relative[0], ratio(updates) ** 0.5)


@examples(100)
@given(seed=SEEDS, eps=EPS, more=EPS)
def test_not_increasing_in_eps(seed: int, eps: float, more: float) -> None:
    """P15: η_g never grows with eps, and shrinks strictly while it is above 1."""
    updates = draw_updates(seed)
    small, large = step_size(updates, eps), step_size(updates, eps + more)
    assert large <= small
    assert large < small or small == 1 or eps + more == eps


@examples(20)
@given(seed=SEEDS, eps=st.sampled_from([1e30, 1e300, float("inf")]))
def test_infinite_eps_is_fedavg(seed: int, eps: float) -> None:
    """P15, sec. 3.3: a large enough eps gives FedAvg, bit for bit, round after round."""
    problem = shared_optimum(seed)
    lr = 1 / problem.smoothness
    exp, avg = (run(problem, a, 4, lr, 3) for a in (fx.fedexp(eps=eps), fx.fedavg()))
    assert exp.steps.tolist() == [1.0] * 4
    np.testing.assert_array_equal(exp.points, avg.points)
    moved = -deltas(problem, problem.start, lr, 3).mean(axis=0)
    tolerance = ROUNDING * np.abs(exp.points).max()
    np.testing.assert_allclose(exp.points[1], problem.start + moved, rtol=0, atol=tolerance)
