"""On a GPU a run resumes bit for bit in the deterministic mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedexp as fx
from fedexp.catalogue import TASKS
from fedexp.experiment import Experiment
from fedexp.models import resnet18
from fedexp.precision import Precision
from fedexp.tasks import Task
from tests.runs.helpers import essence, execute_in, interrupted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pictures() -> Task:
    """Noise in the shape of CIFAR-10 for the paper's ResNet-18."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(1000, 3, 32, 32)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, 10, 1000))
    parts = np.split(np.arange(1000), 20)
    train = fx.data.Federation.from_parts({"x": x, "y": y}, parts)
    return fx.tasks.classification("pictures", lambda: resnet18(10), train, test={"x": x, "y": y})


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_deterministic_runs_resume_bit_for_bit(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "pictures", pictures)
    experiment = Experiment(
        "pictures", "scaffold-exp", rounds=6, cohort=8, device="cuda", precision=precision,
        deterministic=True, options={"local.steps": 5, "local.lr": 0.01},
    )  # fmt: skip
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, tmp_path / "parts", 3)
    execute_in(tmp_path / "parts", experiment)
    assert essence(tmp_path / "parts") == essence(tmp_path / "whole")
