"""Projections onto each kind of set, and POCS and EPPM on all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.projections import Affine, Ball, Box, ConvexSet, HalfSpace, solve


def some_set(kind: str, rng: np.random.Generator, inside: np.ndarray) -> ConvexSet:
    """Return a random set of a kind that contains `inside`."""
    d = len(inside)
    if kind == "affine":
        A = rng.normal(size=(2, d))
        return Affine(A, A @ inside)
    if kind == "half-space":
        a = rng.normal(size=d)
        return HalfSpace(a, float(a @ inside) + rng.random())
    if kind == "ball":
        center = rng.normal(size=d)
        return Ball(center, float(np.linalg.norm(center - inside)) + rng.random())
    return Box(inside - rng.random(d), inside + rng.random(d))


kinds = st.sampled_from(["affine", "half-space", "ball", "box"])


@given(kinds, st.integers(0, 2**32 - 1))
def test_a_projection_is_the_nearest_point(kind: str, seed: int) -> None:
    """<w - P(w), z - P(w)> <= 0 for every z in the set; and P(P(w)) = P(w)."""
    rng = np.random.default_rng(seed)
    inside = rng.normal(size=5)
    each = some_set(kind, rng, inside)
    w = torch.from_numpy(10 * rng.normal(size=5))
    p = each.project(w)
    assert float((w - p) @ (torch.from_numpy(inside) - p)) <= 1e-9
    torch.testing.assert_close(each.project(p), p, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(each.project(torch.from_numpy(inside)), torch.from_numpy(inside))


@given(st.lists(kinds, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_extrapolated_projections_converge_and_never_move_away(kinds: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside = rng.normal(size=6)
    sets = [some_set(kind, rng, inside) for kind in kinds]
    found = solve(sets, 3 * rng.normal(size=6), rounds=50)
    assert all(step >= 1 - 1e-12 for step in found.steps)  # Jensen
    to_inside = (found.iterates - torch.from_numpy(inside)).norm(dim=1)
    assert (to_inside.diff() <= 1e-9).all()


def test_extrapolation_is_faster_than_plain_projections() -> None:
    rng = np.random.default_rng(0)
    A = rng.normal(size=(8, 3, 40))
    x = rng.normal(size=40)
    sets = [Affine(a, a @ x) for a in A]
    plain = solve(sets, np.zeros(40), relaxation=1.0, rounds=2000, tolerance=1e-6)
    fast = solve(sets, np.zeros(40), rounds=2000, tolerance=1e-6)
    assert plain.converged
    assert fast.converged
    assert len(fast.steps) * 2 < len(plain.steps)


def test_affine_matches_the_pseudo_inverse_also_when_rank_deficient() -> None:
    rng = np.random.default_rng(1)
    A = rng.normal(size=(3, 6))
    A = np.vstack([A, A[0] + A[1]])
    b = A @ rng.normal(size=6)
    w = rng.normal(size=6)
    expected = w - np.linalg.pinv(A) @ (A @ w - b)
    got = Affine(A, b).project(torch.from_numpy(w)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


def test_solve_reports_steps_and_distances() -> None:
    found = solve([Ball([0.0, 0.0], 1.0)], [3.0, 4.0])
    assert found.converged
    assert found.steps == [1.0]
    assert found.distances[0] == pytest.approx(4.0)
    assert found.iterates.shape == (2, 2)


def test_an_empty_intersection_does_not_converge() -> None:
    apart = [HalfSpace([1.0], -1.0), HalfSpace([-1.0], -1.0)]
    assert not solve(apart, [0.5], rounds=20).converged


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve([], [0.0]), "at least one set"),
        (lambda: solve([Box([0.0], [1.0])], [0.0], relaxation=2.5), "relaxation"),
        (lambda: solve([Box([0.0], [1.0])], [float("nan")]), "finite"),
        (lambda: Ball([0.0], -1.0), "radius"),
        (lambda: HalfSpace([0.0], 1.0).project(torch.zeros(1).double()), "normal"),
        (lambda: Box([1.0], [0.0]).project(torch.zeros(1).double()), "low <= high"),
        (lambda: Affine([1.0], [1.0]).project(torch.zeros(1).double()), "need A"),
    ],
)
def test_bad_sets_are_refused(call: object, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        call()  # type: ignore[operator]
