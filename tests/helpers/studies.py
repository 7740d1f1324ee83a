"""A study of a user's own: a file with a model, a loss, a transform and rules, and its data."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedexp.data.federation import Federation
from fedexp.local import LocalTraining
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task

STUDY = '''
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import fedexp as fx

SLOPE = 0.5
CONFIG = {"shift": 0.1}


def helper(h):
    return h.tanh()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def hidden(self, x):
        return self.first(x)


class Net(Base):
    """Say."""

    def forward(self, x, scale=1.0):
        h = torch.relu(self.hidden(x)) * SLOPE  # comment
        return self.last(self.more(helper(h) + CONFIG["shift"])) * scale

    @staticmethod
    def more(h):
        return h + 1


def loss(output, y):
    return F.cross_entropy(output, y, reduction="none")


class Shift:
    def draw(self, rng, examples):
        return None

    def draw_steps(self, rng, examples):
        return None

    def train(self, batch, draws):
        return self.evaluate(batch)

    def evaluate(self, batch):
        x = batch["x"]
        return {**batch, "x": x - 1.0}


@dataclass(frozen=True)
class Sign(fx.ServerRule):
    lr: float = 0.01

    def step(self, params, aggregate, state):
        moved = params + -self.lr * aggregate.mean.sign()
        return moved, state, {"server_lr": torch.tensor(self.lr)}


@dataclass(frozen=True)
class Doubled(fx.ClientRule):
    def correct(self, grad, params, start, broadcast, client_state):
        return grad * 2
'''


def imported(folder: Path, text: str, name: str = "study") -> ModuleType:
    """The file of a study, as another process would import it."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = found
    try:
        code = compile(text, str(path), "exec")  # not from a cache of bytecode
        exec(code, vars(found))
    finally:
        if before is not None:
            sys.modules[name] = before
        else:
            del sys.modules[name]
    return found


def federation(sizes: Sequence[int] = (10, 30)) -> Federation:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(40, 3)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 2, 40))
    return Federation({"x": x, "y": y}, np.array([0, *np.cumsum(sizes)]))


def task_of(study: Any, train: Federation | None = None, build: Any = None, **more: Any) -> Task:
    """A task on 40 examples of two clients, with the parts of a study or with plain ones."""
    rng = np.random.default_rng(1)
    test = {"x": torch.from_numpy(rng.normal(size=(8, 3)).astype(np.float32))}
    test["y"] = torch.from_numpy(rng.integers(0, 2, 8))
    plain = build or (lambda: nn.Linear(3, 2))
    objective = ModuleObjective(study.Net, study.loss) if study else ModuleObjective(plain)
    return Task(
        name="mine",
        objective=objective,
        train=train or federation(),
        local=LocalTraining(lr=0.1, steps=2, batch_size=5),
        test=test,
        transform=study.Shift() if study else None,
        rounds=2,
        **more,
    )
