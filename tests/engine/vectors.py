"""What the tests of memory share: a task that is nothing but vectors, and what the system says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.data import Federation
from fedexp.data.federation import Batch
from fedexp.objective import Buffers
from fedexp.tasks import Task

ROOT = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@dataclass(frozen=True)
class Toward:
    """F_i(w) = ||w - x_i||² / 2 with one number x_i: all cost lies in handling the vectors."""

    dim: int

    def batching_pays(self, device: torch.device) -> bool:
        return False

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return torch.zeros(self.dim), Buffers.none()

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return params - batch["x"].mean(), buffers

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        return params - batch["x"].mean(dim=1, keepdim=True), buffers

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (params[0] - batch["x"]).square()}


def toward(dim: int, clients: int) -> Task:
    """One example a client, and one step a round."""
    fields = {"x": torch.arange(clients) / clients, "y": torch.zeros(clients)}
    local = fx.LocalTraining(lr=0.5, steps=1, batch_size=1)
    return Task("toward", Toward(dim), Federation(fields, np.arange(clients + 1)), local)


def status(name: str) -> float:
    """What the system says about this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1e3


def peak() -> float:
    """The most memory this process has held so far, files that it has mapped included."""
    return status("VmHWM")
