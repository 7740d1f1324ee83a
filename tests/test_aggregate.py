"""The aggregate: its laws, weights, dropped clients and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedexp as fx
from fedexp.aggregate import CACHED_COLUMNS, norms, usable
from tests.helpers.rules import random_updates

# Integers add up exactly in float64, so the laws hold to the last bit.
exact = st.integers(-1000, 1000).map(float)
matrices = st.integers(1, 6).flatmap(
    lambda clients: hnp.arrays(np.float64, (clients, 3), elements=exact)
)


def aggregate(rows: np.ndarray, extra: bool = True) -> fx.Aggregate:
    weights = np.arange(1, len(rows) + 1, dtype=float)
    extras = {"control": torch.from_numpy(rows[:, :2])} if extra else {}
    return fx.Aggregate.of(rows, weights, extras)


@given(matrices, matrices, matrices)
def test_is_a_commutative_monoid(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
    a, b, c = (aggregate(rows) for rows in (x, y, z))
    zero = fx.Aggregate.zero(3, torch.float64)
    assert zero + a == a == a + zero
    assert a + b == b + a
    left, right = (a + b) + c, a + (b + c)
    # integers add up exactly; norms are square roots squared again, which may not be integers
    torch.testing.assert_close(left.sq_norm, right.sq_norm, rtol=4e-16, atol=0)
    assert replace(left, sq_norm=right.sq_norm) == right


@given(matrices, st.data())
def test_streaming_and_order_do_not_matter(rows: np.ndarray, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    total = fx.Aggregate.zero(3, torch.float64)
    for i in order:
        total = total + fx.Aggregate.of(rows[i : i + 1])
    # norms are square roots squared again, which costs their last bit
    torch.testing.assert_close(total.pack(), fx.Aggregate.of(rows).pack(), rtol=4e-16, atol=0)


def test_golden_values() -> None:
    deltas = np.array([[1.0, 2.0, 2.0], [0.0, 3.0, 4.0], [2.0, 0.0, 0.0]])
    p = np.array([1.0, 2.0, 5.0])
    agg = fx.Aggregate.of(deltas, p)
    mean = (p[:, None] * deltas).sum(0) / p.sum()
    assert agg.mean.numpy() == pytest.approx(mean, rel=1e-15)
    assert agg.mean_sq_norm.item() == pytest.approx((p * (deltas**2).sum(1)).sum() / p.sum())
    assert agg.sq_norm_of_mean.item() == pytest.approx((mean**2).sum(), rel=1e-14)
    assert (agg.weight.item(), agg.count.item(), agg.dropped.item()) == (8.0, 3.0, 0.0)


def test_the_scale_of_weights_cancels() -> None:
    deltas, p = random_updates(5, 7), torch.rand(5) + 0.1
    one, many = fx.Aggregate.of(deltas, p), fx.Aggregate.of(deltas, 1000 * p)
    torch.testing.assert_close(one.mean, many.mean)
    torch.testing.assert_close(one.mean_sq_norm, many.mean_sq_norm)


@given(matrices, matrices)
def test_packed_buffers_add_up(x: np.ndarray, y: np.ndarray) -> None:
    a, b = aggregate(x), aggregate(y)
    assert a.unpack(a.pack() + b.pack()) == a + b
    assert a.unpack(a.pack()) == a


def test_unpacking_another_layout_is_refused() -> None:
    a = aggregate(np.ones((2, 3)))
    with pytest.raises(fx.UsageError, match="same model and extras"):
        a.unpack(torch.zeros(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_an_update_that_is_not_finite_is_dropped(bad: float) -> None:
    """1e200 is finite, but its square is not: it would make the step size NaN."""
    good = random_updates(3, 4)
    broken = torch.cat([good, torch.tensor([[0.0, bad, 0.0, 0.0]], dtype=torch.float64)])
    agg = fx.Aggregate.of(broken)
    assert (agg.count.item(), agg.dropped.item()) == (3.0, 1.0)
    torch.testing.assert_close(agg.mean, good.mean(0))
    assert usable(broken, {}).tolist() == [True, True, True, False]


def test_a_client_with_a_broken_extra_is_dropped_whole() -> None:
    extras = {"buffers": torch.tensor([[1.0], [float("nan")]])}
    agg = fx.Aggregate.of(torch.ones(2, 3), extras=extras)
    assert agg.dropped.item() == 1.0
    assert agg.mean_extra("buffers").item() == 1.0


def test_all_clients_dropped() -> None:
    agg = fx.Aggregate.of(torch.full((2, 3), float("nan")))
    assert agg.count.item() == 0
    assert agg.mean.tolist() == [0.0, 0.0, 0.0]
    assert agg.mean_sq_norm.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_or_wider(dtype: torch.dtype) -> None:
    deltas = torch.full((300, 2), 1.0, dtype=dtype)
    agg = fx.Aggregate.of(deltas)
    assert agg.update.dtype == torch.float32
    assert agg.update.tolist() == [300.0, 300.0]  # bfloat16 would stop counting at 256
    assert agg.sq_norm.dtype == torch.float64


def test_a_squared_norm_beyond_half_precision_is_exact() -> None:
    agg = fx.Aggregate.of(torch.full((1, 4), 300.0, dtype=torch.float16))
    assert agg.mean_sq_norm.item() == 360_000.0  # float16 ends at 65,504


@pytest.mark.parametrize("first", [-1.0, float("nan"), float("inf"), 1e39, 1e-46])
def test_bad_weights_are_refused(first: float) -> None:
    with pytest.raises(fx.UsageError, match="weights must be 0 or"):
        fx.Aggregate.of(torch.ones(2, 3), [first, 1.0])


def test_a_weight_for_every_client() -> None:
    with pytest.raises(fx.UsageError, match="one weight for each of 2 clients"):
        fx.Aggregate.of(torch.ones(2, 3), [1.0])


def test_a_vector_is_refused() -> None:
    with pytest.raises(fx.UsageError, match=r"shape \[M, d\]"):
        fx.Aggregate.of(torch.ones(3))


def test_lists_of_vectors_of_any_kind() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    kinds = [rows, [np.array(r) for r in rows], [torch.tensor(r) for r in rows], np.array(rows)]
    assert {tuple(fx.Aggregate.of(kind).mean.tolist()) for kind in kinds} == {(2.0, 3.0)}


def test_packing_is_exact_beyond_float32() -> None:
    agg = fx.Aggregate.of(torch.full((2, 3), 1e25), [1.0, 1.0 + 1e-9])
    assert agg.unpack(agg.pack()) == agg
    assert agg.unpack(agg.pack()).mean_sq_norm.item() == pytest.approx(3e50)
    assert agg != fx.Aggregate.of(torch.full((2, 3), 1e25), [1.0, 1.0])


def test_norms_of_models_larger_than_the_cache() -> None:
    rows = random_updates(3, 2 * CACHED_COLUMNS + 17, dtype=torch.float32)
    expected = np.linalg.norm(rows.numpy().astype(np.float64), axis=1)
    np.testing.assert_allclose(norms(rows).numpy(), expected, rtol=1e-13)
    assert norms(torch.full((1, 4), 1e30)).item() == pytest.approx(2e30)


def test_updates_of_other_models_do_not_add() -> None:
    with pytest.raises(fx.UsageError, match="1 and 2 parameters"):
        fx.Aggregate.zero(1) + fx.Aggregate.of(torch.ones(1, 2))
