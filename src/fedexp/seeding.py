"""Randomness as an argument: every draw is a pure function of a seed and of what it is for.

No global generator decides anything. Which clients, which batches and which initial weights a
run sees follows from `(seed, purpose, numbers)` alone, so it does not depend on the engine, the
device, the order of the cohort or the number of processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedexp.errors import require


def sequence(seed: int, purpose: str, *numbers: int) -> np.random.SeedSequence:
    """A seed sequence of its own for each purpose and each tuple of numbers."""
    require(seed >= 0, f"the seed must not be negative, but is {seed}")
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers])


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A numpy generator for one purpose.

    >>> bool(generator(0, "cohort", 3).random() == generator(0, "cohort", 3).random())
    True
    """
    return np.random.default_rng(sequence(seed, purpose, *numbers))


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for a `torch.Generator`."""
    return int(sequence(seed, purpose, *numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded_torch(seed: int, purpose: str, *numbers: int) -> Iterator[None]:
    """Run a block whose layers draw from torch's global generators (initial weights, dropout).

    Their states are put back afterwards, so the caller's own draws are not disturbed. The
    generators are the process's, so two threads must not be in such blocks at a time.
    """
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [g.get_state() for g in generators]
    derived = torch_seed(seed, purpose, *numbers)
    try:
        for each in generators:  # not torch.manual_seed, which records a stack trace for CUDA
            each.manual_seed(derived)
        yield
    finally:
        for each, state in zip(generators, before, strict=True):
            each.set_state(state)
