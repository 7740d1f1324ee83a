"""Randomness as an argument: every draw is a pure function of a seed, a purpose and numbers.

No global generator is used. The clients, batches and initial weights of a run depend on
`(seed, purpose, numbers)` alone, not on the engine, the device, the order of the cohort or the
number of processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedexp.errors import require

GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed integer


def sequence(seed: int, purpose: str, *numbers: int) -> np.random.SeedSequence:
    """Return a distinct seed sequence for each purpose and each tuple of numbers."""
    require(seed >= 0, f"the seed must not be negative, but is {seed}")
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers])


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a numpy generator for one purpose.

    >>> bool(generator(0, "cohort", 3).random() == generator(0, "cohort", 3).random())
    True
    """
    return np.random.default_rng(sequence(seed, purpose, *numbers))


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed for a `torch.Generator`."""
    return int(sequence(seed, purpose, *numbers).generate_state(1, np.uint64)[0] >> 1)


def hashed(key: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return `count` random integers below 2^63 for each of `numbers`, [K, count], on their device.

    SplitMix64 (Steele et al., 2014) in integer arithmetic that wraps, so that all devices agree:
    once for each of `numbers`, then for each of its places. It has no state: the numbers of a
    cohort are computed at once, and those of a client do not depend on the rest of the cohort.

    >>> hashed(torch.tensor(1), torch.tensor([5, 6]), 2)[1].equal(
    ...     hashed(torch.tensor(1), torch.tensor([6]), 2)[0])
    True
    """
    z = key
    for place in (numbers, torch.arange(count, device=numbers.device)):
        z = z[..., None] + GOLDEN * (place + 1)
        # masks remove the copies of the sign, which a shift of a signed integer inserts
        z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
        z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
        z = z ^ ((z >> 31) & (2**33 - 1))
    return (z >> 1) & (2**63 - 1)


@contextmanager
def seeded_torch(seed: int, purpose: str, *numbers: int) -> Iterator[None]:
    """Seed torch's global generators for a block (initial weights, dropout).

    Their states are restored afterwards, so the caller's own draws are not disturbed. The
    generators are global, so only one thread at a time may be inside such a block.
    """
    with preserved_draws() as generators:
        derived = torch_seed(seed, purpose, *numbers)
        for torch_generator in generators:  # torch.manual_seed would record a stack
            torch_generator.manual_seed(derived)
        yield


@contextmanager
def preserved_draws() -> Iterator[list[torch.Generator]]:
    """Restore the states of torch's global generators after a block; yields the generators."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    if torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    before = [g.get_state() for g in generators]
    try:
        yield generators
    finally:
        for torch_generator, state in zip(generators, before, strict=True):
            torch_generator.set_state(state)
