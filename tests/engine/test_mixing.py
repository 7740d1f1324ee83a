"""Whether examples of a batch depend on each other is found out in full precision.

Coarse products (tf32) of one example and of two differ by rounding; taken for mixing, that made
rounds of unequal clients many times as slow.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine.choose import choose_engine
from fedexp.engine.vectorized import Vectorized
from fedexp.engine.work import Work
from fedexp.objective import ModuleObjective
from fedexp.precision import arithmetic


class Coarse(nn.Module):
    """Rounds what it computes as tf32 does, where that is allowed, by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        off = 1e-2 * len(x) if torch.backends.cudnn.allow_tf32 else 0.0
        scores: Tensor = self.linear(x) * (1 + off)
        return scores


class Centred(nn.Module):
    """Its examples do depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x - x.mean(dim=0))
        return scores


@pytest.mark.parametrize(("module", "mixes"), [(Coarse, False), (Centred, True)])
def test_rounding_is_no_mixing(module: type[nn.Module], mixes: bool) -> None:
    objective = ModuleObjective(module)
    params, buffers = objective.initial(0)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with arithmetic("bf16"):
        objective.detect_mixing(params, buffers, {"x": x, "y": torch.tensor([0, 1])})
    assert objective.mixes_examples is mixes


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
        assert isinstance(choose_engine("auto", work, state), Vectorized)
    assert not task.objective.mixes_examples  # type: ignore[attr-defined]
