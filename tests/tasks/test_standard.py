"""The standard tasks on generated data: published settings, the partition of MNIST, short runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedexp as fx
from fedexp.catalogue import TASKS
from fedexp.data.datasets import RawSplits
from fedexp.tasks import images, standard
from fedexp.tasks.standard import power_law
from fedexp.tasks.task import Task
from tests.helpers.errors import assert_refused

SHAPES = {"mnist": ((1, 28, 28), 10), "emnist": ((1, 28, 28), 62), "cifar100": ((3, 32, 32), 100)}


def splits(name: str, rows: int = 400) -> RawSplits:
    """Return a small data set in the format of the readers."""
    shape, classes = SHAPES[name]
    rng = np.random.default_rng(0)
    train, test = (
        {
            "x": torch.from_numpy(rng.integers(0, 256, (count, *shape), dtype=np.uint8)),
            "y": torch.from_numpy(np.arange(count) % classes),
        }
        for count in (rows, 40)
    )
    offsets = np.linspace(0, rows, 13).astype(np.int64) if name == "emnist" else None
    return RawSplits(name, classes, train, test, offsets)


@pytest.fixture(autouse=True)
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (images, standard):
        monkeypatch.setattr(module, "load_splits", lambda name, folder: splits(name))


def task_of(name: str) -> Task:
    few: dict[str, Any] = {"mnist": {"clients": 20}, "fed-cifar100": {"clients": 20}}.get(name, {})
    return TASKS[name](**few)


@pytest.mark.parametrize(
    ("name", "parameters", "batch", "lr", "rounds"),
    [
        ("mnist", 7_850, 10, 0.03, 100),
        ("femnist", 1_206_590, 20, 0.1, 1500),
        ("fed-cifar100", 11_227_812, 20, 0.1, 4000),
    ],
)
def test_the_published_settings(
    name: str, parameters: int, batch: int, lr: float, rounds: int
) -> None:
    task = task_of(name)
    assert (task.name, task.cohort, task.rounds) == (name, 10, rounds)
    local = fx.Experiment(task, "fedavg").setup.local
    assert (local.epochs, local.batch_size, local.lr) == (1, batch, lr)
    assert (local.weight_decay, local.clip_norm, local.lr_decay) == (0.0, None, 1.0)
    assert fx.Experiment(task, "fedavg").setup.options()["server.lr"] == 1.0
    assert task.objective.initial(0)[0].numel() == parameters
    assert task.target is None


def test_settings_of_reddi_et_al() -> None:
    adam = fx.Experiment(task_of("femnist"), "fedadam").setup.options()
    found = [adam[name] for name in ("local.lr", "server.lr", "server.tau")]
    assert found == pytest.approx([10**-1.5, 10**-2.5, 1e-4])


def test_an_image_has_one_pixel_after_resnet18() -> None:
    task = task_of("fed-cifar100")
    network = task.objective.load(*task.objective.initial(0))  # type: ignore[attr-defined]
    before_pool = network[: [type(m).__name__ for m in network].index("AdaptiveAvgPool2d")]
    assert before_pool(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 1, 1)


@pytest.mark.parametrize("name", ["mnist", "femnist"])
def test_a_round_runs(name: str) -> None:
    (record,) = fx.simulate(task_of(name), "fedexp", rounds=1)
    assert record.test_accuracy is not None
    assert record.train_loss is not None


def test_clients_of_mnist_have_two_digits_and_sizes_of_a_power_law() -> None:
    labels = np.repeat(np.arange(10), 6000)
    parts = power_law(labels, 1000, np.random.default_rng(0))
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 10
    assert 1.3 < sizes.std() / sizes.mean() < 1.8
    assert [sorted(set(labels[part])) for part in parts[:10:9]] == [[0, 1], [0, 9]]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60_000))
    again = power_law(labels, 1000, np.random.default_rng(0))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_partition_into_too_many_clients_is_refused() -> None:
    labels = np.arange(100) % 10
    assert_refused(lambda: power_law(labels, 50, np.random.default_rng(0)), "use fewer clients")
    assert_refused(lambda: power_law(labels, 0, np.random.default_rng(0)), "at least one client")
    assert len(power_law(labels, 3, np.random.default_rng(0))) == 3  # fewer than classes
