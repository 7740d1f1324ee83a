"""Clients that share an optimum: local training all but projects, and FedExP makes use of it."""

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
    Problem,
    deltas,
    examples,
    local_paths,
    mean_sq,
    oracle,
    run,
    shared_optimum,
    sq,
)

CONVEX = st.sampled_from(["square", "logcosh"])
STEPS = st.sampled_from([1, 2, 5, 12])
# Shares of 2/L. At 2/L itself two steps may reflect a client back to where it began: no update.
BELOW_TWO = st.one_of(st.just(0.999), st.floats(0.01, 0.999))


def far(problem: Problem) -> float:
    """||w⁰ - w*||², the scale of every distance here: local steps only shorten it."""
    return sq(problem.start - problem.star)


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=FRACTIONS, steps=STEPS)
def test_local_training(seed: int, kind: str, fraction: float, steps: int) -> None:
    """Eq. 2 and 3: the package's local iterates, and the round made of them, are those of numpy."""
    problem = shared_optimum(seed, kind)
    lr = 2 * fraction / problem.smoothness
    truth = problem.paths(problem.start, lr, steps)
    tolerance = ROUNDING * np.abs(truth).max()
    np.testing.assert_allclose(local_paths(problem, lr, steps), truth, rtol=0, atol=tolerance)
    averaged = run(problem, fx.fedavg(), 1, lr, steps).points[1]
    np.testing.assert_allclose(averaged, truth[-1].mean(axis=0), rtol=0, atol=tolerance)


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=FRACTIONS, steps=STEPS)
def test_approximate_projection(seed: int, kind: str, fraction: float, steps: int) -> None:
    """P2, Lemma 1: with η_l <= 1/L, (1/M) sum ||w_i - w*||² <= ||w - w*||², for each client less
    (η_l/L) sum_k ||∇F_i||²."""
    problem = shared_optimum(seed, kind)
    L = problem.smoothness
    lr = fraction / L
    paths = local_paths(problem, lr, steps)
    slopes = sum(np.square(problem.gradients(point)).sum(axis=1) for point in paths[:-1])
    ends = np.square(paths[-1] - problem.star).sum(axis=1)
    tolerance = ROUNDING * far(problem)
    assert ends.mean() <= far(problem) + tolerance
    assert (ends <= far(problem) - lr / L * slopes + tolerance).all()


@examples(40)
@given(seed=SEEDS, kind=CONVEX, fraction=st.one_of(st.just(1.0), FRACTIONS), steps=STEPS)
def test_approximate_projection_up_to_two(
    seed: int, kind: str, fraction: float, steps: int
) -> None:
    """P2 beyond the paper: it holds for η_l <= 2/L, less η_l (2/L - η_l) sum_k ||∇F_i||²."""
    problem = shared_optimum(seed, kind)
    L = problem.smoothness
    lr = 2 * fraction / L
    paths = local_paths(problem, lr, steps)
    slopes = sum(np.square(problem.gradients(point)).sum(axis=1) for point in paths[:-1])
    ends = np.square(paths[-1] - problem.star).sum(axis=1)
    tolerance = ROUNDING * far(problem) + ROUNDING * np.abs(paths).max() ** 2
    assert ends.mean() <= far(problem) + tolerance
    assert (ends <= far(problem) - lr * (2 / L - lr) * slopes + tolerance).all()


@examples(20)
@given(excess=st.floats(0.01, 0.5), steps=STEPS)
def test_two_is_the_limit(excess: float, steps: int) -> None:
    """P2: on one quadratic a step of (2 + excess)/L multiplies the error by -(1 + excess)."""
    A, b = np.array([[[3.0]]]), np.array([[6.0]])
    problem = Problem(A, b, star=np.array([2.0]), start=np.array([2.5]))
    end = run(problem, fx.fedavg(), 1, (2 + excess) / 9, steps).points[1]
    # Each step rounds at the size of w, which grows as the error does.
    grown = (-(1 + excess)) ** steps * 0.5
    assert end[0] - 2 == pytest.approx(grown, rel=ROUNDING, abs=0)


@examples(60)
@given(
    seed=SEEDS,
    kind=CONVEX,
    fraction=BELOW_TWO,
    steps=STEPS,
    eps=EPS,
)
def test_nearer_to_the_best_step(
    seed: int, kind: str, fraction: float, steps: int, eps: float
) -> None:
    """P3, eq. 7: η_opt >= sum ||Δ_i||² / (2M ||Δ̄||²); P4: |η_opt - η_g| <= |η_opt - 1|."""
    problem = shared_optimum(seed, kind)
    lr = 2 * fraction / problem.smoothness
    updates = deltas(problem, problem.start, lr, steps)
    best = oracle(problem.start, problem.star, updates)
    free = run(problem, fx.fedexp(eps=0.0, clamp=False), 1, lr, steps).steps[0]
    eta = run(problem, fx.fedexp(eps=eps), 1, lr, steps).steps[0]
    # Δ_i is a difference of points of size |w|: what it has lost, the step sizes have lost too.
    size = np.abs(updates.mean(axis=0)).max()
    lost = max(np.abs(problem.start).max(), np.abs(updates).max()) / size
    tolerance = ROUNDING * best * (1 + lost)
    assert free == pytest.approx(mean_sq(updates) / 2 / sq(updates.mean(axis=0)), abs=tolerance)
    assert best >= free - tolerance
    assert abs(best - eta) <= abs(best - 1) + tolerance


@examples(60)
@given(
    seed=SEEDS,
    kind=CONVEX,
    fraction=BELOW_TWO,
    steps=STEPS,
    eps=EPS,
)
def test_one_step_beats_fedavg(
    seed: int, kind: str, fraction: float, steps: int, eps: float
) -> None:
    """P5, sec. 3.3: from the same point, one round of FedExP ends no further from w* than FedAvg's.

    The points are those that FedExP itself visits. Nothing is claimed for whole trajectories.
    """
    problem = shared_optimum(seed, kind)
    lr = 2 * fraction / problem.smoothness
    ours = run(problem, fx.fedexp(eps=eps), 3, lr, steps)
    for here, after in zip(ours.points[:-1], ours.points[1:], strict=True):
        average = run(replace(problem, start=here), fx.fedavg(), 1, lr, steps).points[1]
        tolerance = ROUNDING * (far(problem) + sq(problem.star))
        assert sq(after - problem.star) <= sq(average - problem.star) + tolerance


@examples(60)
@given(
    seed=SEEDS,
    kind=CONVEX,
    fraction=BELOW_TWO,
    steps=STEPS,
    eps=EPS,
)
def test_distance_never_grows(
    seed: int, kind: str, fraction: float, steps: int, eps: float
) -> None:
    """P6, eq. 6: ||w - w*||² never grows; it changes by η_g² ||Δ̄||² - 2 η_g <w - w*, Δ̄>."""
    problem = shared_optimum(seed, kind)
    lr = 2 * fraction / problem.smoothness
    ours = run(problem, fx.fedexp(eps=eps), 8, lr, steps)
    distances = np.square(ours.points - problem.star).sum(axis=1)
    tolerance = ROUNDING * (far(problem) + sq(problem.star))
    assert (np.diff(distances) <= tolerance).all()
    for t, eta in enumerate(ours.steps):
        updates = deltas(problem, ours.points[t], lr, steps)
        gain = eta * (2 * (ours.points[t] - problem.star) - eta * updates.mean(axis=0))
        change = -float(gain @ updates.mean(axis=0))
        assert distances[t + 1] - distances[t] == pytest.approx(change, abs=tolerance * eta)
