"""Where the noise comes from: the system's entropy, or a seed in tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.seeding import generator

Normals = Callable[[int], Tensor]  # so many independent draws of N(0, 1), in float64


def system_normals(count: int) -> Tensor:
    """Standard normal numbers by Box and Muller, every bit of them from the system's entropy.

    The noise of a release must stay unknown to whoever sees the model. A generator with a seed,
    even a good one, makes all of it follow from a few bytes that someone may learn or guess.

    >>> bool((system_normals(4) != system_normals(4)).any())
    True
    """
    pairs = (count + 1) // 2
    uniform = system_uniforms(2 * pairs)
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:pairs]))  # 1 - u lies in (0, 1]
    angle = 2.0 * np.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normal[:count])


def system_uniforms(count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits each, from the system's entropy."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seeded_normals(seed: int, *numbers: int) -> Normals:
    """Reproducible normals for tests; a release with them is not private.

    >>> bool((seeded_normals(0, 1)(4) == seeded_normals(0, 1)(4)).all())
    True
    """
    rng = generator(seed, "privacy", *numbers)
    return lambda count: torch.from_numpy(rng.standard_normal(count))


def normals(seed: int | None, *numbers: int) -> Normals:
    """The system's normals, or seeded ones where a seed is given."""
    return system_normals if seed is None else seeded_normals(seed, *numbers)
