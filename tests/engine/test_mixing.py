"""Rounding of half precision is not taken for disagreement with the loop.

Once it was, and rounds of unequal clients were many times as slow.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine.plan import Work
from fedexp.engine.select import select_engine
from fedexp.precision import arithmetic


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_unequal_writers_are_batched_in_bf16() -> None:
    rng, sizes = np.random.default_rng(0), (20, 60, 130)
    fields = {
        "x": torch.from_numpy(rng.integers(0, 256, (sum(sizes), 1, 28, 28), dtype=np.uint8)),
        "y": torch.from_numpy(rng.integers(0, 62, sum(sizes))),
    }
    writers = Federation(fields, np.cumsum([0, *sizes]))
    images = Images((0.0,), (1.0,), augment=None)
    build = partial(fx.models.emnist_cnn, 62)
    task = fx.tasks.classification("writers", build, writers, transform=images)
    task = task.to(torch.device("cuda"), "bf16")
    state = fx.SimulationState.initial(task, fx.fedexp(), 0)
    work = Work(task, fx.fedexp(), task.local, "uniform", 0, 1, np.arange(3))
    with arithmetic("bf16"):
        assert select_engine("auto", work, state, "bf16").name == "batched (layers)"
