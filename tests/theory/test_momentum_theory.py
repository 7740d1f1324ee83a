"""FedExP with server momentum: its recursion, its lemma, and what it reduces to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.projections import Affine, Ball, ConvexSet
from tests.helpers.theory import (
    EPS,
    ROUNDING,
    SEEDS,
    Array,
    examples,
    mean_sq,
    run,
    shared_optimum,
    sq,
)

BETAS = st.floats(0.0, 0.99)
ROUNDS = 8


class Trace(NamedTuple):
    """Round by round: w^t, v^t, m^t, the step size, and the momentum and numerator of the rule."""

    points: list[Array]
    momenta: list[Array]
    norms: list[float]
    steps: list[float]
    states: list[tuple[Array, float]]


def shared_sets(seed: int) -> tuple[list[ConvexSet], Array, Array]:
    """A hyperplane, further affine sets and balls, all through w*; a start off the hyperplane."""
    rng = np.random.default_rng(seed)
    dim = int(rng.integers(3, 9))
    star, normal = rng.normal(size=(2, dim))
    sets: list[ConvexSet] = [Affine(normal[None], normal[None] @ star)]
    for _ in range(rng.integers(0, 5)):
        if rng.random() < 0.7:
            A = rng.normal(size=(rng.integers(1, 3), dim))
            sets.append(Affine(A, A @ star))
        else:
            center = 3 * rng.normal(size=dim)
            sets.append(Ball(center, float(np.linalg.norm(center - star))))
    return sets, star, star + 5 * rng.normal(size=dim)


def trace(seed: int, beta: float, eps: float) -> tuple[Trace, Array]:
    """Feed exact projections to the rule, and compute the sums of the lemma beside it."""
    sets, star, start = shared_sets(seed)
    rule, w = fx.MomentumExP(eps=eps, beta=beta), torch.tensor(start)
    state, seen, v = rule.init(w), Trace([], [], [], [], []), np.zeros_like(start)
    for _ in range(ROUNDS):
        updates = np.stack([(w - each.project(w)).numpy() for each in sets])
        v = updates.mean(axis=0) + beta * v
        seen.points.append(w.numpy())
        seen.momenta.append(v)
        seen.norms.append(mean_sq(updates))
        w, state, metrics = rule.step(w, fx.Aggregate.of(updates), state)
        seen.steps.append(float(metrics["server_lr"]))
        seen.states.append((state["momentum"].numpy(), float(state["sq"])))
    seen.points.append(w.numpy())
    return seen, star


def numerator(norms: list[float], t: int, beta: float) -> float:
    """S^t = m^t + sum_{k<t} (β/2)^{t-k} m^k, as printed."""
    return norms[t] + sum((beta / 2) ** (t - k) * norms[k] for k in range(t))


@examples(60)
@given(seed=SEEDS, beta=BETAS, eps=EPS)
def test_recursion(seed: int, beta: float, eps: float) -> None:
    """App. F: v^t = Δ̄^t + β v^{t-1}; η_g = S^t / (2 (||v^t||² + eps)); w ← w - η_g v^t."""
    seen, star = trace(seed, beta, eps)
    size = max(float(np.abs(seen.points[0]).max()), float(np.abs(star).max()), 1.0)
    for t, (v, eta) in enumerate(zip(seen.momenta, seen.steps, strict=True)):
        S = numerator(seen.norms, t, beta)
        momentum, total = seen.states[t]
        np.testing.assert_allclose(momentum, v, rtol=0, atol=ROUNDING * size)
        assert total == pytest.approx(S, rel=ROUNDING, abs=0)
        # v may be a small rest of large updates: its relative rounding is that much larger.
        lost = ROUNDING * (1 + size / sq(v) ** 0.5)
        assert eta == pytest.approx(S / (2 * (sq(v) + eps)), rel=lost, abs=0)
        tolerance = ROUNDING * size * (1 + eta)
        np.testing.assert_allclose(
            seen.points[t + 1], seen.points[t] - eta * v, rtol=0, atol=tolerance
        )


@examples(100)
@given(seed=SEEDS, beta=BETAS, eps=EPS)
def test_momentum_lemma(seed: int, beta: float, eps: float) -> None:
    """P13, Lemma 11: <w^t - w*, v^t> >= S^t for exact projections, so η_opt >= S^t / ||v^t||²."""
    seen, star = trace(seed, beta, eps)
    for t, v in enumerate(seen.momenta):
        inner = float((seen.points[t] - star) @ v)
        tolerance = ROUNDING * (sq(seen.points[0]) + sq(star))
        assert inner >= numerator(seen.norms, t, beta) - tolerance


@examples(60)
@given(seed=SEEDS, beta=BETAS, eps=EPS)
def test_momentum_never_leads_away(seed: int, beta: float, eps: float) -> None:
    """P13: so every round comes closer to w*, by at least 2 η_g S^t - η_g² ||v^t||² >= 0."""
    seen, star = trace(seed, beta, eps)
    distances = [sq(w - star) for w in seen.points]
    tolerance = ROUNDING * (distances[0] + sq(star))
    for t, (v, eta) in enumerate(zip(seen.momenta, seen.steps, strict=True)):
        gain = 2 * eta * numerator(seen.norms, t, beta) - eta**2 * sq(v)
        assert gain >= 0
        assert distances[t + 1] <= distances[t] - gain + tolerance * (1 + eta)


@examples(30)
@given(seed=SEEDS, eps=EPS, clamp=st.booleans())
def test_no_momentum_is_fedexp(seed: int, eps: float, clamp: bool) -> None:
    """P16: β = 0 is FedExP without the clamp, bit for bit; with `clamp` set it is FedExP itself."""
    problem = shared_optimum(seed)
    lr = 1 / problem.smoothness
    plain = run(problem, fx.fedexp(eps=eps, clamp=clamp), 5, lr, 3)
    reduced = run(problem, fx.fedexp_m(eps=eps, beta=0.0, clamp=clamp), 5, lr, 3)
    assert reduced.steps.tolist() == plain.steps.tolist()
    np.testing.assert_array_equal(reduced.points, plain.points)


@examples(30)
@given(seed=SEEDS, beta=BETAS)
def test_first_round_has_no_past(seed: int, beta: float) -> None:
    """P16, App. F: v^{-1} = 0, so the first round is FedExP's without the clamp, whatever β is."""
    problem = shared_optimum(seed)
    lr = 1 / problem.smoothness
    first = run(problem, fx.fedexp_m(eps=0.0, beta=beta), 1, lr, 3)
    plain = run(problem, fx.fedexp(eps=0.0, clamp=False), 1, lr, 3)
    np.testing.assert_array_equal(first.points[1], plain.points[1])


@examples(30)
@given(seed=SEEDS)
def test_printed_default_has_no_clamp(seed: int) -> None:
    """docs/paper.md#momentum-bound: η_g may be below 1; one client alone has η_g = 1/2."""
    problem = shared_optimum(seed).client(0)
    first = run(problem, fx.fedexp_m(eps=0.0), 1, 1 / problem.smoothness, 3)
    assert first.steps[0] == pytest.approx(0.5, rel=ROUNDING, abs=0)
