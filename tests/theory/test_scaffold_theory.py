"""SCAFFOLD-ExP: Algorithm 2 in numpy, and the invariant of its control variates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from tests.helpers.theory import (
    EPS,
    ROUNDING,
    SEEDS,
    Array,
    Problem,
    disputed_optimum,
    examples,
    mean_sq,
    run,
    shared_optimum,
    sq,
)

STEPS = st.sampled_from([1, 2, 5])
ROUNDS = 4


def algorithm_2(problem: Problem, rounds: int, lr: float, steps: int, eps: float) -> list[Array]:
    """w⁰ ... w^T of SCAFFOLD-ExP with full participation, line by line as printed."""
    w, c = problem.start, np.zeros_like(problem.start)
    own = np.zeros((len(problem.A), len(w)))
    points = [w]
    for _ in range(rounds):
        local = np.tile(w, (len(own), 1))
        for _ in range(steps):
            local = local - lr * (problem.gradients(local) - own + c)
        updates = w - local
        psi = c - updates / (steps * lr)
        mean = updates.mean(axis=0)
        w = w - max(1.0, mean_sq(updates) / (2 * (sq(mean) + eps))) * mean
        own, c = own - psi, c - psi.mean(axis=0)
        points.append(w)
    return points


def controls(record: fx.Record, clients: int) -> tuple[Array, Array]:
    """c, and all c_i row by row; a client that was never seen has zero."""
    c = record.state.broadcast["control"].numpy()
    seen = record.state.clients
    rows = [seen[i]["control"].numpy() if i in seen else 0 * c for i in range(clients)]
    return c, np.stack(rows)


@examples(40)
@given(seed=SEEDS, fraction=st.floats(0.05, 1.0), steps=STEPS, eps=EPS)
def test_algorithm_2(seed: int, fraction: float, steps: int, eps: float) -> None:
    """P17, Algorithm 2: the package computes the same iterates as the printed lines."""
    problem = disputed_optimum(seed)
    lr = fraction / (steps * problem.smoothness)
    truth = np.stack(algorithm_2(problem, ROUNDS, lr, steps, eps))
    ours = run(problem, fx.scaffold_exp(eps=eps), ROUNDS, lr, steps)
    # A control is an update over τ η_l, and a step size multiplies what Δ̄ has lost in rounding.
    growth = float(np.prod(ours.steps)) * np.abs(truth).max()
    np.testing.assert_allclose(ours.points, truth, rtol=0, atol=ROUNDING * growth)


@examples(40)
@given(seed=SEEDS, fraction=st.floats(0.05, 1.0), steps=STEPS, data=st.data())
def test_control_is_the_mean(seed: int, fraction: float, steps: int, data: st.DataObject) -> None:
    """P17, docs/paper.md#scaffold-partial-participation: c = (1/N) sum c_i after every round."""
    problem = disputed_optimum(seed)
    clients = len(problem.A)
    cohort = data.draw(st.integers(1, clients))
    lr = fraction / (steps * problem.smoothness)
    ours = run(problem, fx.scaffold_exp(eps=0.1), 6, lr, steps, cohort=cohort, seed=seed)
    for record in ours.records:
        c, own = controls(record, clients)
        assert np.abs(own).max() > 0
        # Controls are quotients of differences: Δ_i rounds at |w|, and is divided by τ η_l.
        size = np.abs(own).max() + np.abs(ours.points).max() / (steps * lr)
        np.testing.assert_allclose(c, own.mean(axis=0), rtol=0, atol=ROUNDING * size)


@examples(40)
@given(seed=SEEDS, fraction=st.floats(0.05, 1.0), steps=STEPS)
def test_controls_are_mean_gradients(seed: int, fraction: float, steps: int) -> None:
    """P17, Algorithm 2 (option II): after a round c_i = Δ_i/(τ η_l) + c_i - c, at first the mean of
    client i's gradients."""
    problem = disputed_optimum(seed)
    lr = fraction / (steps * problem.smoothness)
    record = run(problem, fx.scaffold_exp(eps=0.1), 1, lr, steps).records[0]
    _, own = controls(record, len(problem.A))
    met = [problem.gradients(w) for w in problem.paths(problem.start, lr, steps)[:-1]]
    size = np.abs(own).max() + np.abs(problem.start).max() / (steps * lr)
    np.testing.assert_allclose(own, np.mean(met, axis=0), rtol=0, atol=ROUNDING * size)


@examples(30)
@given(seed=SEEDS, fraction=st.floats(0.05, 1.0), steps=STEPS, eps=EPS)
def test_first_round_is_fedexp(seed: int, fraction: float, steps: int, eps: float) -> None:
    """P17: with c = c_i = 0 the first round is FedExP's, bit for bit."""
    problem = disputed_optimum(seed)
    lr = fraction / (steps * problem.smoothness)
    plain = run(problem, fx.fedexp(eps=eps), 1, lr, steps)
    ours = run(problem, fx.scaffold_exp(eps=eps), 1, lr, steps)
    assert ours.steps[0] == plain.steps[0]
    np.testing.assert_array_equal(ours.points[1], plain.points[1])


@examples(30)
@given(seed=SEEDS, steps=STEPS)
def test_one_client_has_no_drift(seed: int, steps: int) -> None:
    """P17: a client alone always has c_i = c, so SCAFFOLD-ExP corrects nothing."""
    problem = shared_optimum(seed).client(0)
    lr = 1 / problem.smoothness
    plain = run(problem, fx.fedexp(), ROUNDS, lr, steps)
    ours = run(problem, fx.scaffold_exp(), ROUNDS, lr, steps)
    tolerance = ROUNDING * np.abs(plain.points).max()
    np.testing.assert_allclose(ours.points, plain.points, rtol=0, atol=tolerance)
