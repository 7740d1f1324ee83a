"""The paper's problem in the plane: two lines that meet in (0, 3), and projections on them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.projections import Affine, solve
from tests.helpers.theory import Array, examples, sq

STAR = np.array([0.0, 3.0])
LINES = [Affine([[3.0, 1.0]], [3.0]), Affine([[1.0, 1.0]], [3.0])]
EXACT = fx.Algorithm("exact", server=fx.ExP(eps=0.0, factor=1.0), average_last=1)

# Local training leaves (2/3)^100 = 2e-18 of the way to a line, and rounds at |w| <= 6: 1e-15. After
# 30 rounds w is 4e-3 from w*, and Δ̄ is a sixth of a projection, squared: 1e-15 / 4e-3 * 6² = 1e-11
# for one round's rounding, and the earlier rounds' is in w as well. Ten digits are left.
DIGITS = 1e-10
NEAR = 1e-14  # 45 roundings: eight rounds in the plane, beside numbers of the size of w
PLANE = st.tuples(st.floats(-5, 5), st.floats(-5, 5))


def records(start: tuple[float, float], rounds: int) -> list[fx.Record]:
    return list(fx.simulate(fx.tasks.toy(start), EXACT, rounds))


def points(start: tuple[float, float], run: list[fx.Record]) -> Array:
    """w⁰ ... w^T."""
    return np.array([start, *(record.state.params.tolist() for record in run)])


def loss(w: Array) -> float:
    """F = (F₁ + F₂) / 2."""
    return float(((3 * w[0] + w[1] - 3) ** 2 + (w[0] + w[1] - 3) ** 2) / 2)


def on_line(normal: Array, w: Array) -> Array:
    """The projection of w on the line through w* with this normal."""
    point: Array = w - normal * (normal @ (w - STAR)) / (normal @ normal)
    return point


def test_step_sizes_have_period_two() -> None:
    """P9: from the origin η_g = 1.2, 6, 1.2, 6, ..."""
    steps = [record.server_lr for record in records((0.0, 0.0), 30)]
    assert steps == pytest.approx([1.2, 6.0] * 15, rel=DIGITS)


def test_alternating_projections() -> None:
    """P9, sec. 5: a start on S₁ gives η_g = 2 for ever: the model jumps from line to line."""
    run = records((1.0, 0.0), 30)
    assert [r.server_lr for r in run] == pytest.approx([2.0] * 30, rel=DIGITS)
    w = np.array([1.0, 0.0])
    for t, record in enumerate(run):
        w = on_line(np.array([1.0, 1.0] if t % 2 == 0 else [3.0, 1.0]), w)
        # Alternating projections contract, so the rounding of 30 rounds at |w| <= 4 adds up to
        # at most 30 * 4 ulp.
        np.testing.assert_allclose(record.state.params.numpy(), w, rtol=0, atol=1e-13)


@examples(40)
@given(along=st.floats(-5, 5).filter(lambda x: abs(x) > 1e-2), first=st.booleans())
def test_a_client_at_rest(along: float, first: bool) -> None:
    """P9, sec. 5: Δ_1 = 0 gives η_g = 2 and w^{t+1} = w_2, the other client's model, and back."""
    mine, other = np.array([3.0, 1.0]), np.array([1.0, 1.0])
    if not first:
        mine, other = other, mine
    start = STAR + along * np.array([mine[1], -mine[0]])
    record = records((float(start[0]), float(start[1])), 1)[0]
    lost = 1e-15 / abs(along) * np.abs(start).max()  # Δ_2 is |along|, cut out of numbers of |w|
    assert record.server_lr == pytest.approx(2.0, rel=1e-12 + 10 * lost)
    tolerance = 1e-14 * (1 + np.abs(start).max())
    np.testing.assert_allclose(record.state.params.numpy(), on_line(other, start), atol=tolerance)


def test_distance_falls_while_the_loss_does_not() -> None:
    """P9, sec. 5: ||w - w*|| falls in every round, yet F rises in 15 of 30: hence the averaging."""
    run = records((0.0, 0.0), 30)
    path = points((0.0, 0.0), run)
    distances = [sq(w - STAR) for w in path]
    losses = [loss(w) for w in path]
    assert all(after < before for before, after in pairwise(distances))
    assert sum(after > before for before, after in pairwise(losses)) == 15
    assert [r.train_loss for r in run] == pytest.approx(losses[1:], rel=DIGITS)


@examples(40)
@given(start=PLANE)
def test_distance_monotone_from_anywhere(start: tuple[float, float]) -> None:
    """P6 and P9: from any start the distance falls; its square by η_g² ||Δ̄||², the step's own."""
    run = records(start, 8)
    path = points(start, run)
    distances = np.square(path - STAR).sum(axis=1)
    tolerance = NEAR * (distances[0] + sq(STAR))
    assert (np.diff(distances) <= tolerance).all()
    moves = np.square(np.diff(path, axis=0)).sum(axis=1)
    np.testing.assert_allclose(
        -np.diff(distances), moves, rtol=0, atol=6 * tolerance
    )  # η_g is up to 6


@examples(40)
@given(start=PLANE)
def test_oracle_on_the_toy(start: tuple[float, float]) -> None:
    """P7 and P9: both lines are affine, so each step is the best one along Δ̄."""
    run = records(start, 2)
    for w, record in zip(points(start, run)[:-1], run, strict=True):
        updates = np.stack([w - on_line(np.array(n), w) for n in ([3.0, 1.0], [1.0, 1.0])])
        mean = updates.mean(axis=0)
        if np.linalg.norm(mean) < 1e-2:  # at the optimum every step is best
            continue
        best = float((w - STAR) @ mean) / sq(mean)
        # |w| <= 10 beside |Δ̄| >= 1e-2 costs three digits, and squaring Δ̄ the same again.
        assert record.server_lr == pytest.approx(best, rel=1e-10)


@examples(40)
@given(start=PLANE)
def test_local_training_solves_exactly(start: tuple[float, float]) -> None:
    """P8 and P9: the toy task is EPPM on the two lines: same iterates, same steps."""
    found = solve(LINES, torch.tensor(start, dtype=torch.float64), rounds=6, tolerance=1e-2)
    run = records(start, 6)[: len(found.steps)]
    # A step of up to 6 multiplies the rounding of Δ̄ (1e-15 at |w| <= 10), six rounds long.
    np.testing.assert_allclose(points(start, run), found.iterates.numpy(), rtol=0, atol=1e-11)
    steps = [record.server_lr for record in run]
    assert steps == pytest.approx(found.steps, rel=1e-9)  # 1e-11 / tolerance
