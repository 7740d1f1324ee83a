"""Theorems 1 and 2 and the lemmas behind them, with the constants that their proofs give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from tests.helpers.theory import (
    EPS,
    FRACTIONS,
    ROUNDING,
    SEEDS,
    Array,
    Problem,
    disputed_optimum,
    examples,
    local_paths,
    mean_sq,
    run,
    shared_optimum,
    sq,
)

CONVEX = st.sampled_from(["square", "logcosh"])
STEPS = st.sampled_from([1, 2, 5, 10])
ROUNDS = 12


def pulls(problem: Problem) -> float:
    """σ*² = (1/M) sum ||∇F_i(w*)||² (Assumption 2)."""
    return mean_sq(problem.gradients(problem.star))


def variance(problem: Problem, w: Array) -> float:
    """(1/M) sum ||∇F_i(w) - ∇F(w)||² (Assumption 3, at one point)."""
    gradients = problem.gradients(w)
    return mean_sq(gradients - gradients.mean(axis=0))


def small_lr(problem: Problem, fraction: float, steps: int) -> float:
    """η_l <= 1/(6 τ L)."""
    return fraction / (6 * steps * problem.smoothness)


def nonconvex(seed: int, shared: bool) -> Problem:
    """Welsch losses; their infimum 0 is reached when the optimum is shared, else it is a bound.

    Residuals begin at 2.5 or less: beyond, the losses are flat and nothing moves.
    """
    problem = (shared_optimum if shared else disputed_optimum)(seed, "welsch")
    unit = min(1.0, 2.5 / np.abs(problem.A @ problem.start - problem.b).max())
    return replace(problem, A=unit * problem.A, b=unit * problem.b)


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=FRACTIONS, steps=STEPS)
def test_client_gradients_and_drift(seed: int, kind: str, fraction: float, steps: int) -> None:
    """P12, Lemmas 5 and 6: local gradients and local drift are bounded by F(w) - F* and σ*².

    No rounding is allowed for: on these problems the bounds hold 3 and 18 times over.
    """
    problem = disputed_optimum(seed, kind)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    paths = package_paths(problem, lr, steps)
    best = problem.loss(problem.star)
    gap = problem.loss(problem.start) - best
    drift = sum(mean_sq(point - problem.start) for point in paths[:-1])
    slopes = sum(mean_sq(problem.gradients(point)) for point in paths[:-1])
    assert gap >= -ROUNDING * best  # so w* is a minimum
    assert slopes <= 3 * L**2 * drift + 6 * steps * L * gap + 3 * steps * pulls(problem)
    spread = steps**2 * (steps - 1) * lr**2
    assert drift <= 12 * spread * L * gap + 6 * spread * pulls(problem)


@examples(40)
@given(seed=SEEDS, shared=st.booleans(), fraction=FRACTIONS, steps=STEPS)
def test_nonconvex_drift(seed: int, shared: bool, fraction: float, steps: int) -> None:
    """P12, Lemma 7: (1/M) sum ||∇F_i - h_i||² <= ||∇F||²/8 + 5 η_l² L² τ(τ-1) σ_g², at each w.

    No rounding is allowed for: on these problems the bound holds 20 times over.
    """
    problem = nonconvex(seed, shared)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    paths = package_paths(problem, lr, steps)
    normalised = np.mean([problem.gradients(point) for point in paths[:-1]], axis=0)
    here = problem.gradients(problem.start)
    bound = sq(here.mean(axis=0)) / 8
    bound += 5 * (lr * L) ** 2 * steps * (steps - 1) * variance(problem, problem.start)
    assert mean_sq(here - normalised) <= bound


def package_paths(problem: Problem, lr: float, steps: int) -> Array:
    """Return the package's local iterates, checked to be gradient descent."""
    paths, truth = local_paths(problem, lr, steps), problem.paths(problem.start, lr, steps)
    np.testing.assert_allclose(paths, truth, rtol=0, atol=ROUNDING * np.abs(truth).max())
    return paths


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=FRACTIONS, steps=STEPS, eps=EPS)
def test_theorem_1(seed: int, kind: str, fraction: float, steps: int, eps: float) -> None:
    """P10, Theorem 1: F(w̄) - F* is bounded, with the constants of the proof, by

    3 ||w⁰ - w*||² / (η_l τ Σ η_g) + 9 η_l τ σ*² + 36 η_l² τ(τ-1) L σ*².

    w̄ is the mean of w⁰ ... w^{T-1} weighted by η_g; by Jensen the mean of F(w^t) bounds F(w̄).
    """
    problem = disputed_optimum(seed, kind)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    ours = run(problem, fx.fedexp(eps=eps), ROUNDS, lr, steps)
    weights = ours.steps / ours.steps.sum()
    best = problem.loss(problem.star)
    gap = problem.loss(weights @ ours.points[:-1]) - best
    mean_gap = weights @ [problem.loss(w) for w in ours.points[:-1]] - best
    bound = 3 * sq(problem.start - problem.star) / (lr * steps * ours.steps.sum())
    bound += (9 * lr * steps + 36 * lr**2 * steps * (steps - 1) * L) * pulls(problem)
    assert gap <= mean_gap + ROUNDING * (best + mean_gap)
    assert mean_gap <= bound


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=FRACTIONS, steps=STEPS, eps=EPS)
def test_rounds_of_theorem_1(seed: int, kind: str, fraction: float, steps: int, eps: float) -> None:
    """P10, proof of Theorem 1: every round satisfies its key inequality, tight at η_g = r:

    ||w⁺ - w*||² <= ||w - w*||² - 2 η_g η_l <w - w*, h̄> + η_g η_l² (1/M) sum ||h_i||².
    """
    problem = disputed_optimum(seed, kind)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    ours = run(problem, fx.fedexp(eps=eps), ROUNDS, lr, steps)
    before = [sq(w - problem.star) for w in ours.points]
    for w, eta, near, after in zip(ours.points, ours.steps, before, before[1:], strict=False):
        sums = problem.paths(w, lr, steps)[:-1]
        h = np.sum([problem.gradients(point) for point in sums], axis=0)
        inner = float((w - problem.star) @ h.mean(axis=0))
        tolerance = ROUNDING * (sq(w) + sq(problem.star)) * eta
        assert after <= near - 2 * eta * lr * inner + eta * lr**2 * mean_sq(h) + tolerance
        gap = problem.loss(w) - problem.loss(problem.star)
        floor = 3 * (lr * steps) ** 2 + 12 * lr**3 * steps**2 * (steps - 1) * L
        assert after <= near - eta * lr * steps / 3 * gap + eta * floor * pulls(problem) + tolerance


@examples(40)
@given(seed=SEEDS, shared=st.booleans(), fraction=FRACTIONS, steps=STEPS, eps=EPS)
def test_theorem_2(seed: int, shared: bool, fraction: float, steps: int, eps: float) -> None:
    """P11, Theorem 2: the η_g-weighted mean of ||∇F(w^t)||², hence its minimum over t = 0 ... T-1,
    is at most 8 (F(w⁰) - F*)/(η_l τ Σ η_g) + 40 η_l² L² τ(τ-1) σ_g² + 24 η_l L τ σ_g²."""
    problem = nonconvex(seed, shared)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    ours = run(problem, fx.fedexp(eps=eps), ROUNDS, lr, steps)
    visited = ours.points[:-1]
    slopes = np.array([sq(problem.gradients(w).mean(axis=0)) for w in visited])
    sigma = max(variance(problem, w) for w in visited)
    bound = 8 * problem.loss(problem.start) / (lr * steps * ours.steps.sum())
    bound += (40 * (lr * L) ** 2 * steps * (steps - 1) + 24 * lr * L * steps) * sigma
    mean = ours.steps @ slopes / ours.steps.sum()
    assert slopes.min() <= mean * (1 + ROUNDING)
    assert mean <= bound


@examples(40)
@given(seed=SEEDS, shared=st.booleans(), fraction=FRACTIONS, steps=STEPS, eps=EPS)
def test_rounds_of_theorem_2(
    seed: int, shared: bool, fraction: float, steps: int, eps: float
) -> None:
    """P11, Theorem 2 with corrected signs (docs/paper.md#theorem-2-signs): every round descends,

    F(w⁺) - F(w) <= -η_g η_l τ (||∇F||²/8 - 3 η_l τ L σ_g² - 5 η_l² L² τ(τ-1) σ_g²).
    """
    problem = nonconvex(seed, shared)
    L, lr = problem.smoothness, small_lr(problem, fraction, steps)
    ours = run(problem, fx.fedexp(eps=eps), ROUNDS, lr, steps)
    losses = [problem.loss(w) for w in ours.points]
    for w, eta, here, after in zip(ours.points, ours.steps, losses, losses[1:], strict=False):
        slope = sq(problem.gradients(w).mean(axis=0)) / 8
        floor = 3 * lr * steps * L + 5 * (lr * L) ** 2 * steps * (steps - 1)
        fall = eta * lr * steps * (slope - floor * variance(problem, w))
        assert after - here <= -fall + ROUNDING * problem.A.shape[1]  # F is at most n


@pytest.mark.parametrize("seed", [0, 1])
def test_longer_steps_on_synthetic(seed: int) -> None:
    """P18, sec. 4: Σ η_g >= T on the paper's problem, without the clamp (#notebook-clamp)."""
    task = fx.tasks.synthetic(clients=10, rows=10, dim=200, seed=seed)
    free, clamped = (
        list(fx.simulate(task, fx.fedexp(eps=0.0, clamp=clamp), 20, evaluate_every=20))
        for clamp in (False, True)
    )
    steps = np.array([record.server_lr for record in free], dtype=float)
    assert steps.sum() >= len(steps)
    assert (steps > 1).all()
    assert [record.server_lr for record in clamped] == steps.tolist()
    assert not any(record.metrics["clamped"] for record in clamped)
