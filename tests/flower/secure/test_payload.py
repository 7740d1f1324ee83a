"""The encoding of updates for a secure sum, and settings that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedexp import fedavg, fedexp, scaffold_exp
from fedexp.errors import UsageError
from fedexp.flower import Server
from fedexp.flower.layout import Layout
from fedexp.flower.secure.payload import (
    MODULUS,
    Payload,
    SecureAggregation,
    Vector,
    levels_for,
)
from tests.flower.helpers.secure import (
    server_of,
)

SECURE = SecureAggregation(clip=2.0)


def summed(payload: Payload, vectors: list[Vector]) -> Vector:
    """The mean that comes out of Flower's quantiser, modulus and all, by its own formulas."""
    half = payload.levels / 2
    integers = [np.rint((np.clip(v, -1, 1) + 1) * half).astype(np.int64) for v in vectors]
    total = np.sum(integers, axis=0) % MODULUS
    mean: Vector = (total / half - len(vectors)) / len(vectors)
    return mean


def updates(clients: int, dim: int, norm: float, seed: int = 0) -> list[Vector]:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=dim)
    raw = [rng.normal(size=dim) + 0.5 * common for _ in range(clients)]
    return [norm * rng.uniform(0.5, 1) * each / np.linalg.norm(each) for each in raw]


@given(st.integers(1, 5000))
@settings(max_examples=50, deadline=None)
def test_the_largest_sum_fits_the_modulus_and_no_finer_power_of_two_would(clients: int) -> None:
    assert clients * levels_for(clients) < MODULUS <= 2 * clients * levels_for(clients)


@pytest.mark.parametrize("norm", [1.0, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("clients", [3, 10, 40])
@pytest.mark.parametrize("dim", [1_000, 100_000])
def test_the_step_size_is_right_even_for_updates_much_shorter_than_the_clip(
    dim: int, clients: int, norm: float
) -> None:
    deltas = updates(clients, dim, norm)
    payload = Payload(clip=1.0, levels=levels_for(clients), dim=dim)
    sums = payload.unpack(summed(payload, [payload.pack(d) for d in deltas]), clients)
    exact = sum(d @ d for d in deltas) / np.square(np.sum(deltas, axis=0)).sum()
    found = sums.sq_norm / np.square(sums.update).sum()
    assert found == pytest.approx(exact, rel=2e-4)
    assert sums.longer == 0


def test_long_updates_are_scaled_down_and_counted() -> None:
    payload = Payload(clip=5.0, levels=levels_for(3), dim=4)
    long, short = np.array([30.0, 0, 40.0, 0]), np.array([1.0, 2.0, 0, 0])
    mean = summed(payload, [payload.pack(v) for v in (long, short, long)])
    sums = payload.unpack(mean, 3)
    assert sums.longer == 2
    assert sums.update == pytest.approx([7.0, 2.0, 8.0, 0.0], abs=1e-7)
    assert sums.sq_norm == pytest.approx(25 + 5 + 25, rel=1e-7)


def test_with_a_bound_the_bit_is_whether_an_update_is_longer_than_the_median() -> None:
    payload = Payload(clip=6.0, levels=levels_for(3), dim=2, bound=3.0)  # a median of 2
    lengths = (1.9, 2.1, 60.0)
    mean = summed(payload, [payload.pack(np.array([0.0, length])) for length in lengths])
    sums = payload.unpack(mean, 3)
    assert sums.longer == 2
    assert sums.update == pytest.approx([0.0, 1.9 + 2.1 + 6.0], abs=1e-7)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.integers(3, 12))
@settings(max_examples=60, deadline=None)
def test_packed_values_are_in_range_and_the_mean_square_is_never_too_small(
    seed: int, scale: float, clients: int
) -> None:
    """Else Flower cuts it silently, or the diversity falls below one."""
    payload = Payload(clip=1.0, levels=levels_for(clients), dim=50)
    packed = [payload.pack(d) for d in updates(clients, 50, scale, seed)]
    assert max(np.abs(v).max() for v in packed) <= 1.0
    sums = payload.unpack(summed(payload, packed), clients)
    assert clients * sums.sq_norm >= np.square(sums.update).sum() * (1 - 1e-12)


def test_flower_has_nothing_left_to_round() -> None:
    payload = Payload(clip=0.3, levels=levels_for(7), dim=1000)
    steps = (payload.pack(updates(1, 1000, 0.2)[0]) + 1) * (payload.levels / 2)
    assert (steps == np.rint(steps)).all()


def test_sums_are_reproducible_to_the_last_bit_in_any_order() -> None:
    payload = Payload(clip=1.0, levels=levels_for(5), dim=300)
    packed = [payload.pack(d) for d in updates(5, 300, 0.7)]
    first, second = (payload.unpack(summed(payload, p), 5) for p in (packed, packed[::-1]))
    assert (first.update == second.update).all()
    assert first.sq_norm == second.sq_norm


def test_extras_are_summed_beside_the_update() -> None:
    payload = Payload(1.0, levels_for(3), 2, (("buffers", 1), ("control", 2)), extras_bound=4.0)
    one = {"buffers": np.array([0.5]), "control": np.array([-4.0, 1.0])}
    vectors = [payload.pack(np.array([0.1, 0.2]), one)] * 3
    sums = payload.unpack(summed(payload, vectors), 3)
    assert sums.extras["buffers"] == pytest.approx([1.5], abs=1e-7)
    assert sums.extras["control"] == pytest.approx([-12.0, 3.0], abs=1e-7)
    assert sums.update == pytest.approx([0.3, 0.6], abs=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    payload = Payload(1.0, 2**20, 2, (("control", 1),), extras_bound=1.0)
    with pytest.raises(UsageError, match="not finite"):
        payload.pack(np.array([bad, 0.0]), {"control": np.zeros(1)})
    with pytest.raises(UsageError, match="extras_bound"):
        payload.pack(np.zeros(2), {"control": np.array([bad])})


def test_an_extra_beyond_its_bound_is_refused_and_not_cut() -> None:
    payload = Payload(1.0, 2**20, 1, (("control", 2),), extras_bound=0.5)
    payload.pack(np.zeros(1), {"control": np.array([0.5, -0.5])})
    with pytest.raises(UsageError, match=r"control is beyond extras_bound=0\.5") as refusal:
        payload.pack(np.zeros(1), {"control": np.array([0.0, 0.625])})
    assert "625" not in str(refusal.value)  # the text reaches the server


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="clip must be positive"):
        Payload(0.0, 2**20, 10)
    with pytest.raises(UsageError, match="set extras_bound"):
        Payload(1.0, 2**20, 10, (("control", 10),))
    with pytest.raises(UsageError, match="fewer clients per round"):
        Payload(1.0, levels_for(2**20), 10**7)


def batch_norm_server() -> Server:
    model: dict[str, np.ndarray] = {
        "w": np.zeros(3, np.float32),
        "running_mean": np.full(2, 5, np.float32),
        "batches": np.zeros((), np.int64),
    }
    return Server(fedavg(), ArrayRecord({name: Array(value) for name, value in model.items()}))


def test_settings_that_a_secure_sum_cannot_meet_are_refused_before_the_first_round() -> None:
    layout = server_of(10).layout
    sgd, control = fedexp().client, scaffold_exp().client
    SECURE.payload(sgd, layout, 3)
    with pytest.raises(UsageError, match="at least 3 clients"):
        SECURE.payload(sgd, layout, 2)
    with pytest.raises(UsageError, match="control would have to be summed too: set extras_bound"):
        SECURE.payload(control, layout, 3)
    with pytest.raises(UsageError, match="buffers would have to be"):
        SECURE.payload(sgd, batch_norm_server().layout, 3)
    SecureAggregation(1.0, extras_bound=1.0).payload(control, layout, 3)
    wide = Layout.of({"w": np.broadcast_to(np.float32(0), (10**9,))})
    with pytest.raises(UsageError, match="fewer clients per round"):
        SECURE.payload(sgd, wide, 10**6)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"clip": 0.0}, "clip must be positive"),
        ({"clip": float("nan")}, "clip must be positive"),
        ({"clip": 1.0, "extras_bound": -1.0}, "extras_bound must be positive"),
        ({"clip": 1.0, "shares": 4}, "an odd number"),
        ({"clip": 1.0, "threshold": 0.5}, "threshold must be in"),
        ({"clip": 1.0, "fewest": 2}, "fewest must be at least 3"),
        ({"clip": "1"}, "clip must be positive and at most 1e30, not '1'"),
        ({"clip": None}, "clip must be positive and at most 1e30, not None"),
        ({"clip": 1.0, "shares": 3.5}, "shares must be a whole number"),
        ({"clip": 1.0, "threshold": "0.7"}, "threshold must be in"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        SecureAggregation(**options)
