"""Exact projections: the step without the factor 2, the oracle, and how descent gets there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.projections import Affine, Ball, Box, ConvexSet, HalfSpace, Relaxation, solve
from tests.helpers.theory import (
    FRACTIONS,
    ROUNDING,
    SEEDS,
    Array,
    Problem,
    examples,
    mean_sq,
    oracle,
    run,
    shared_optimum,
    sq,
)


class Sets(NamedTuple):
    """Sets that hold every point within `margin` of w*, and a starting point."""

    sets: list[ConvexSet]
    star: Array
    start: Array
    margin: float


def fat_sets(seed: int) -> Sets:
    """Balls, half-spaces and boxes around w*, none of which is affine."""
    rng = np.random.default_rng(seed)
    dim, margin = int(rng.integers(2, 8)), float(rng.uniform(0.01, 0.5))
    star = rng.normal(size=dim)
    start = star + 4 * rng.normal(size=dim)
    drawn = [_fat_set(rng, star, margin) for _ in range(rng.integers(2, 7))]
    towards = (start - star) / np.linalg.norm(start - star)
    return Sets([*drawn, HalfSpace(towards, float(towards @ star) + margin)], star, start, margin)


def _fat_set(rng: np.random.Generator, star: Array, margin: float) -> ConvexSet:
    kind, a = rng.integers(3), rng.normal(size=star.shape)
    if kind == 0:
        return Ball(a, float(np.linalg.norm(a - star)) + margin)
    if kind == 1:
        return HalfSpace(a, float(a @ star) + margin * float(np.linalg.norm(a)))
    return Box(star - margin - np.abs(a), star + margin + np.abs(rng.normal(size=star.shape)))


def affine_sets(problem: Problem) -> list[ConvexSet]:
    """The clients' solution sets {w : A_i w = b_i}."""
    return [Affine(A, b) for A, b in zip(problem.A, problem.b, strict=True)]


def projected(sets: list[ConvexSet], w: Array) -> Array:
    """P_i(w), row by row."""
    return np.stack([each.project(torch.tensor(w)).numpy() for each in sets])


def one_step(w: Array, updates: Array) -> tuple[float, Array]:
    """The step size of FedExP for exact projections, and where it leads."""
    rule, at = fx.ExP(eps=0.0, factor=1.0, clamp=False), torch.tensor(w)
    moved, _, metrics = rule.step(at, fx.Aggregate.of(updates), rule.init(at))
    return float(metrics["server_lr"]), moved.numpy()


@examples(60)
@given(seed=SEEDS)
def test_affine_projection(seed: int) -> None:
    """Lemma 9: P(w) = V₂V₂ᵀ w + V₁ Σ₁⁻¹ Uᵀ b, the nearest solution of A w = b."""
    problem = shared_optimum(seed)
    w, cut = problem.start, min(problem.A.shape[1:])
    for A, b, point in zip(problem.A, problem.b, projected(affine_sets(problem), w), strict=True):
        U, S, Vt = np.linalg.svd(A, full_matrices=True)
        along, null = Vt[:cut], Vt[cut:]
        truth = null.T @ (null @ w) + along.T @ ((U[:, :cut].T @ b) / S[:cut])
        # Solving with A loses as many digits as its condition number has.
        tolerance = (
            ROUNDING * S[0] / S[cut - 1] * (1 + np.abs(w).max() + np.abs(problem.star).max())
        )
        np.testing.assert_allclose(point, truth, rtol=0, atol=tolerance)


@examples(60)
@given(seed=SEEDS)
def test_projections_are_nearest_points(seed: int) -> None:
    """App. C.4.1: <w - P(w), z - P(w)> <= 0 for every z of the set, and P(P(w)) = P(w)."""
    case = fat_sets(seed)
    points = projected(case.sets, case.start)
    others = np.random.default_rng(seed).normal(size=case.star.shape) * 3
    tolerance = ROUNDING * (sq(case.start) + sq(others) + sq(case.star))
    for each, point, z in zip(case.sets, points, projected(case.sets, others), strict=True):
        assert (case.start - point) @ (z - point) <= tolerance
        np.testing.assert_allclose(projected([each], point)[0], point, rtol=0, atol=tolerance)


@examples(60)
@given(seed=SEEDS)
def test_affine_step_is_the_oracle(seed: int) -> None:
    """P7: for affine sets the ratio IS the best step, whichever common point w* one measures to."""
    problem = shared_optimum(seed)
    w = problem.start
    updates = w - projected(affine_sets(problem), w)
    eta, _ = one_step(w, updates)
    rows = np.concatenate(list(problem.A))
    others = [problem.star]
    if len(rows) < rows.shape[1]:  # then the last right singular vector leads to another optimum
        others.append(problem.star + 3 * np.linalg.svd(rows)[2][-1])
    worst = max(np.linalg.cond(A) for A in problem.A)
    for star in others:
        lost = np.linalg.norm(w - star) + np.linalg.norm(star)
        tolerance = ROUNDING * worst * (1 + lost / np.linalg.norm(updates.mean(axis=0)))
        assert eta == pytest.approx(oracle(w, star, updates), rel=tolerance, abs=0)


@examples(100)
@given(seed=SEEDS)
def test_sets_with_interior_allow_longer_steps(seed: int) -> None:
    """P7, App. C.4.1: η_opt >= r with no factor 2, strictly when w* is inside the sets.

    A set that holds a ball of radius ρ around w* gives <w - w*, Δ_i> >= ||Δ_i||² + ρ ||Δ_i||.
    """
    case = fat_sets(seed)
    updates = case.start - projected(case.sets, case.start)
    eta, moved = one_step(case.start, updates)
    best = oracle(case.start, case.star, updates)
    norms = np.linalg.norm(updates, axis=1)
    extra = case.margin * norms.mean() / sq(updates.mean(axis=0))
    tolerance = ROUNDING * best
    assert best >= eta + extra - tolerance
    assert extra > 1e-4  # so the inequality above is strict, far beyond tolerance
    average = case.start - updates.mean(axis=0)
    scale = sq(case.start) + sq(case.star)
    assert sq(moved - case.star) <= sq(average - case.star) + ROUNDING * scale


@examples(40)
@given(seed=SEEDS, relaxation=st.one_of(st.just("extrapolated"), st.floats(0.1, 1.9)))
def test_every_round_comes_closer(seed: int, relaxation: Relaxation) -> None:
    """P6, sec. 3.1: POCS w ← w + λ (mean P_i(w) - w) never leads away from w*, nor does EPPM."""
    case = fat_sets(seed)
    found = solve(case.sets, case.start, relaxation=relaxation, rounds=15)
    points = found.iterates.numpy()
    distances = np.square(points - case.star).sum(axis=1)
    assert (np.diff(distances) <= ROUNDING * distances[0]).all()
    for here, after, step in zip(points[:-1], points[1:], found.steps, strict=True):
        towards = projected(case.sets, here) - here
        r = mean_sq(towards) / sq(towards.mean(axis=0))
        # r and Δ̄ lose digits as w nears the sets: 1e-10 is where `solve` stops.
        lost = ROUNDING * (1 + np.abs(here).max() / np.linalg.norm(towards.mean(axis=0)))
        assert step == pytest.approx(relaxation if isinstance(relaxation, float) else r, rel=lost)
        tolerance = ROUNDING * step * (1 + np.abs(here).max())
        np.testing.assert_allclose(
            after, here + step * towards.mean(axis=0), rtol=0, atol=tolerance
        )


@examples(40)
@given(seed=SEEDS, fraction=FRACTIONS, steps=st.sampled_from([1, 10, 60]))
def test_descent_becomes_projection(seed: int, fraction: float, steps: int) -> None:
    """P8, Lemma 10: for 0 < η_l < 2/λ_max descent tends to P(w), by max |1 - η_l σ²| per step."""
    problem = shared_optimum(seed).client(0)
    singular = np.linalg.svd(problem.A[0], compute_uv=False)
    lr = 1.99 * fraction / singular[0] ** 2
    rate = np.abs(1 - lr * singular**2).max()
    target = projected(affine_sets(problem), problem.start)[0]
    end = run(problem, fx.fedavg(), 1, lr, steps).points[1]
    tolerance = ROUNDING * singular[0] / singular[-1] * (1 + np.abs(problem.start).max())
    bound = rate**steps * np.linalg.norm(problem.start - target)
    assert rate < 1
    assert np.linalg.norm(end - target) <= bound + tolerance


@examples(20)
@given(seed=SEEDS, excess=st.floats(0.01, 0.5))
def test_descent_beyond_the_limit(seed: int, excess: float) -> None:
    """P8, docs/paper.md#projection-learning-rate: beyond 2/λ_max, not λ_max, descent diverges."""
    problem = shared_optimum(seed).client(0)
    top = np.linalg.svd(problem.A[0])[2][0]
    lr = (2 + excess) / problem.smoothness
    away = [abs(top @ (w - problem.star)) for w in run(problem, fx.fedavg(), 10, lr, 1).points]
    lost = np.abs(problem.start).max() + np.abs(problem.star).max()
    tolerance = ROUNDING * (1 + lost / away[0])  # away[0] is a difference of numbers of this size
    assert away[-1] == pytest.approx((1 + excess) ** 10 * away[0], rel=tolerance, abs=0)
