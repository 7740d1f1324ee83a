"""Noise is normal, and nobody's seed decides it."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch

from fedexp.aggregate import Aggregate
from fedexp.privacy import CentralMechanism, normals, seeded_normals, system_normals

DRAWS = 100_000


def test_the_systems_normals_are_normal() -> None:
    """Five standard errors each: all four fail by chance less than once in 10⁵ runs."""
    drawn = system_normals(DRAWS)
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        error = math.sqrt(spread / DRAWS)
        assert abs((drawn**power).mean().item() - moment) < 5 * error
    inside = (drawn.abs() < 1.0).double().mean().item()
    assert inside == pytest.approx(math.erf(math.sqrt(0.5)), abs=5 * math.sqrt(0.22 / DRAWS))


def test_pairs_of_a_draw_are_not_correlated() -> None:
    drawn = system_normals(DRAWS)
    half = DRAWS // 2
    assert abs((drawn[:half] * drawn[half:]).mean().item()) < 5 / math.sqrt(half)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_number_of_draws(count: int) -> None:
    assert system_normals(count).shape == (count,)
    assert normals(3, 1)(count).dtype == torch.float64


def test_no_seed_repeats_the_systems_noise() -> None:
    def release() -> Aggregate:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        mechanism = CentralMechanism(1.0, 1.0, 1e-5, 10, 10, norm_weight=0.5)
        return mechanism.release(Aggregate.of(torch.zeros(10, 4)), round=1)

    assert not torch.equal(release().update, release().update)


def test_all_of_it_comes_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def same(count: int) -> bytes:
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(os, "urandom", same)
    first = system_normals(4)
    assert torch.equal(first, system_normals(4))
    assert asked == [32, 32]


def test_seeded_noise_differs_between_rounds_and_clients() -> None:
    streams = [seeded_normals(0, *numbers)(3) for numbers in [(1,), (2,), (1, 7), (1, 8)]]
    assert len({tuple(stream.tolist()) for stream in streams}) == 4
    assert torch.equal(seeded_normals(0, 1)(3), streams[0])
