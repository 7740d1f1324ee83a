"""Small tasks of the engine tests, rounds by an engine of a class, and the memory of a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.data.federation import Batch
from fedexp.engine.base import Run
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.simulation import run_round
from fedexp.models import GroupNormReLU
from fedexp.objective import Buffers, ModuleObjective
from fedexp.precision import Precision, arithmetic
from fedexp.tasks import Task
from fedexp.tasks.task import Weighting
from tests.helpers.problems import BatchNormNet, Net

# Two orders of one sum: float64 leaves 1e-16 per term, which grows over the rounds.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
SIZES = (3, 40, 17, 8, 1, 25)  # smaller than a batch, not a multiple of it, a single example
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Tasks ------------------------------------------------------------------------------------------


def net() -> nn.Module:
    return Net().double()


def double_batch_norm() -> nn.Module:
    return BatchNormNet().double()


def unequal(build: Callable[[], nn.Module] = net, sizes: tuple[int, ...] = SIZES) -> Task:
    """Return vectors of three classes, for clients of unequal sizes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sum(sizes))
    x = rng.normal(size=(3, 4))[y] + rng.normal(size=(len(y), 4))
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    local = fx.LocalTraining(lr=0.1, steps=6, batch_size=8)
    offsets = np.cumsum([0, *sizes])
    return Task("unequal", ModuleObjective(build), Federation(fields, offsets), local, fields)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(6, 6, 3, padding=1)
        self.join = GroupNormReLU(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.join(self.body(x), x)
        return out


def small_resnet() -> nn.Module:
    return nn.Sequential(
        Double(),
        nn.Conv2d(3, 6, 3, stride=2),
        nn.GroupNorm(3, 6),
        nn.ReLU(),
        Residual(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3, bias=False),
    ).double()


def images() -> Task:
    """Return augmented images, with clipping and weight decay, for a small ResNet."""
    rng = np.random.default_rng(0)
    sizes = np.array([0, 9, 12, 30, 34])
    pixels = rng.integers(256, size=(34, 3, 8, 8), dtype=np.uint8)
    fields = {"x": torch.from_numpy(pixels), "y": torch.from_numpy(rng.integers(0, 3, 34))}
    return fx.tasks.classification(
        "convolutional",
        small_resnet,
        Federation(fields, sizes),
        transform=Images((0.5,) * 3, (0.25,) * 3),
        local=fx.LocalTraining(lr=0.05, steps=4, batch_size=8, clip_norm=1.0, weight_decay=0.01),
    )


@dataclass(frozen=True)
class Toward:
    """F_i(w) = ||w - x_i||² / 2 with one number x_i: all cost is in handling the vectors."""

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
    """Return a task with one example per client and one step per round."""
    fields = {"x": torch.arange(clients) / clients, "y": torch.zeros(clients)}
    local = fx.LocalTraining(lr=0.5, steps=1, batch_size=1)
    return Task("toward", Toward(dim), Federation(fields, np.arange(clients + 1)), local)


# Rounds -----------------------------------------------------------------------------------------


def work_of(
    task: Task,
    algorithm: fx.Algorithm,
    local: fx.LocalTraining | None = None,
    round: int = 1,
    cohort: int | None = None,
    weighting: Weighting = "uniform",
) -> Work:
    """Return the work of a round, of all clients by default."""
    clients = sample_cohort(0, round, task.train.clients, cohort)
    return Work(task, algorithm, local or task.local, weighting, 0, round, clients)


def run_rounds(
    engine: Run,
    task: Task,
    algorithm: fx.Algorithm,
    rounds: int = 3,
    weighting: Weighting = "uniform",
    precision: Precision = "float32",
) -> list[fx.Record]:
    """Return the records of a few rounds of three clients, by this engine."""
    state, records = fx.SimulationState.initial(task, algorithm, 0), []
    for t in range(1, rounds + 1):
        work = work_of(task, algorithm, round=t, cohort=3, weighting=weighting)
        with arithmetic(precision):
            records.append(run_round(work, state, engine))
        state = records[-1].state
    return records


def assert_agree(
    task: Task, algorithm: fx.Algorithm, engine: str = "batched", **options: Any
) -> None:
    """Assert that four rounds of a named engine are those of the loop, client states included."""
    runs = [
        list(fx.simulate(task, algorithm, 4, engine=name, **options))  # type: ignore[arg-type]
        for name in ("loop", engine)
    ]
    for one, other in zip(*runs, strict=True):
        assert other.engine.startswith(engine)
        assert_same_state(one.state, other.state)


def assert_same_state(one: fx.SimulationState, other: fx.SimulationState) -> None:
    torch.testing.assert_close(one.params, other.params, **EXACT)
    torch.testing.assert_close(one.output()[0], other.output()[0], **EXACT)
    torch.testing.assert_close(one.buffers.averaged, other.buffers.averaged, **EXACT)
    assert torch.equal(one.buffers.kept, other.buffers.kept)
    assert set(one.clients) == set(other.clients)
    for client, state in one.clients.items():
        torch.testing.assert_close(state, other.clients[client], **EXACT)


# Memory -----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def status(name: str) -> float:
    """Return an entry of /proc about this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1e3


def peak() -> float:
    """Return the peak memory of this process in MB, mapped files included."""
    return status("VmHWM")


def in_child(call: str) -> str:
    """Return the output of a call from `tests.engine.memory_programs` in a process of its own."""
    program = f"from tests.engine.memory_programs import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout
