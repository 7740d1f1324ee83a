"""Stacked layers in the engine: which models have them, and that they change no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine import EngineName
from fedexp.models import GroupNormReLU, cifar_cnn, emnist_cnn, resnet18
from fedexp.objective.module import ModuleObjective
from fedexp.objective.stack import CannotStackError, stacked
from fedexp.tasks import Task
from tests.engine.test_engines_agree import assert_agree, double_batch_norm, unequal


class Scaled(nn.Module):
    """A weight of its own, which is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.layer(x)
        return out


class LooksInside(nn.Module):
    """Uses a layer's weight without calling the layer: stacked, it has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)


class TiesRows(nn.Module):
    """Reshapes examples into each other: right for one client, wrong for a stack of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out - out.flip(0).detach()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def images() -> Task:
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


def engine_of(task: Task, name: EngineName = "batched") -> str:
    return next(fx.simulate(task, fx.fedexp(), 1, engine=name)).engine


@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(), fx.scaffold_exp(), fx.fedprox()], ids=lambda a: a.name
)
def test_convolutions_and_normalisation_change_no_number(algorithm: fx.Algorithm) -> None:
    task = images()
    assert_agree(task, algorithm, cohort=3)
    assert engine_of(task) == "batched (layers)"


def test_zeros_behind_the_parameters_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made longer on a GPU; here with a multiple that fits no model."""
    monkeypatch.setattr(ModuleObjective, "aligned", 7)
    for task in (images(), unequal(), unequal(double_batch_norm, (7, 7, 7))):
        assert_agree(task, fx.scaffold_exp(), cohort=3)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Scaled, "batched (vmap)"),
        (LooksInside, "batched (vmap)"),
        (TiesRows, "batched (vmap, not padded)"),
    ],
)
def test_models_that_cannot_be_stacked_run_all_the_same(build: type[nn.Module], name: str) -> None:
    task = unequal(lambda: build().double())
    assert_agree(task, fx.fedexp(), cohort=3)
    assert engine_of(task) == name


@pytest.mark.parametrize("build", [lambda: resnet18(10), emnist_cnn, cifar_cnn])
def test_the_papers_models_have_stacked_forms(build: object) -> None:
    assert stacked(build())  # type: ignore[operator]


def test_reasons() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    odd = nn.Conv2d(4, 4, 3, groups=2)
    for module, reason in (
        (tied, "share"),
        (frozen, "frozen"),
        (odd, "plain"),
        (nn.BatchNorm1d(3), "buffers"),
        (Scaled(), "Scaled"),
    ):
        with pytest.raises(CannotStackError, match=reason):
            stacked(module)
