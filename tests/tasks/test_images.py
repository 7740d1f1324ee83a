"""The image tasks on small generated data: settings of the paper, errors, and short runs."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.data import partition
from fedexp.data.datasets import RawSplits, load
from fedexp.data.federation import Batch, Federation
from fedexp.data.transforms import Images
from fedexp.errors import UsageError
from fedexp.local import LocalTraining
from fedexp.models import cifar_cnn, emnist_cnn, logistic, mlp, resnet18
from fedexp.seeding import generator
from fedexp.tasks import images as tasks
from fedexp.tasks.supervised import classification
from fedexp.tasks.task import Task

CLASSES = {"emnist": 62, "cifar10": 10, "cifar100": 100, "cinic10": 10}
TASKS: dict[str, Callable[..., Task]] = {
    "emnist": tasks.emnist,
    "cifar10": tasks.cifar10,
    "cifar100": tasks.cifar100,
    "cinic10": tasks.cinic10,
    "cifar10-cnn": tasks.cifar10_cnn,
}


def examples(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> Batch:
    """Return images whose brightness depends on their class, so that a model can learn."""
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=count)
    noise = rng.integers(80, size=(count, *shape))
    bright = (y * 175 // max(classes - 1, 1)).reshape(-1, *[1] * len(shape))
    return {"x": torch.from_numpy((noise + bright).astype(np.uint8)), "y": torch.from_numpy(y)}


def splits(name: str, count: int = 400) -> RawSplits:
    """Return a small data set in the format of the readers."""
    shape = (1, 28, 28) if name == "emnist" else (3, 32, 32)
    train, test = (examples(n, shape, CLASSES[name], seed=n) for n in (count, 40))
    offsets = np.array([0, 1, 30, count // 2, count]) if name == "emnist" else None
    return RawSplits(name, CLASSES[name], train, test, offsets)


@cache
def default(name: str) -> Task:
    """Return a task with its default arguments; cached, because a ResNet is slow to build."""
    return TASKS[name]()


@pytest.fixture(autouse=True)
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "load_splits", lambda name, folder: splits(name))


@pytest.mark.parametrize(
    ("name", "clients", "parameters", "target", "lr"),
    [
        ("emnist", 4, 1_206_590, 0.84, 10**-0.5),
        ("cifar10", 100, 11_173_962, 0.72, 0.01),
        ("cifar100", 100, 11_173_962 + 90 * 513, 0.40, 0.01),
        ("cinic10", 200, 11_173_962, 0.58, 0.01),
        ("cifar10-cnn", 10, 744_330, None, 0.01),
    ],
)
def test_the_settings_of_the_paper(
    name: str, clients: int, parameters: int, target: float | None, lr: float
) -> None:
    task = default(name)
    assert task.name == name
    assert task.train.clients == clients
    assert task.objective.initial(0)[0].numel() == parameters
    assert task.target == target
    assert task.rounds == 500
    assert task.local == LocalTraining(
        lr=lr, steps=20, batch_size=50, weight_decay=1e-4, clip_norm=10.0, lr_decay=0.998
    )
    assert task.cohort == (None if name == "cifar10-cnn" else min(20, clients))
    assert task.metric == ("train_accuracy" if name == "cifar10-cnn" else "test_accuracy")
    assert isinstance(task.transform, Images)
    assert task.transform.augment == (None if name == "emnist" else "example")


def test_clients_are_of_equal_size_and_follow_the_seed() -> None:
    first, again, other = (tasks.cifar10_cnn(clients=8, seed=seed).train for seed in (1, 1, 2))
    assert set(first.sizes.tolist()) == {50}
    assert torch.equal(first.fields["y"], again.fields["y"])
    assert not torch.equal(first.fields["y"], other.fields["y"])


def test_the_partition_is_the_dirichlet_one() -> None:
    data = splits("cifar10")
    task = tasks.cifar10_cnn(clients=8, alpha=0.1, seed=5)
    rng = generator(5, "cifar10 partition")
    parts = partition.dirichlet(data.train["y"].numpy(), 8, 0.1, rng)
    for client, part in enumerate(parts):
        assert torch.equal(task.train.client(client)["x"], data.train["x"][part])


def test_emnist_has_one_client_per_writer() -> None:
    assert default("emnist").train.sizes.tolist() == [1, 29, 170, 200]


@pytest.mark.parametrize(
    ("pixels", "paper", "ink"),
    [("tff", 1.0, 0.0), ("ink", 0.0, 1.0), ("normalised", -0.1736 / 0.3317, 0.8264 / 0.3317)],
)
def test_emnist_pixels_enter_the_model_as_asked(pixels: Any, paper: float, ink: float) -> None:
    task = tasks.emnist(pixels=pixels)
    assert task.transform is not None
    x = torch.tensor([255, 0], dtype=torch.uint8).reshape(1, 1, 1, 2)
    assert task.transform.evaluate({"x": x})["x"].flatten().tolist() == pytest.approx([paper, ink])


def test_emnist_pixels_are_part_of_a_spec() -> None:
    experiment = fx.Experiment("emnist", "fedavg")
    assert experiment.spec["arguments"]["pixels"] == "tff"
    ink = experiment.with_options({"task.pixels": "ink"})
    assert ink.spec["arguments"]["pixels"] == "ink"
    with pytest.raises(UsageError, match="must be one of tff, ink, normalised"):
        _ = experiment.with_options({"task.pixels": "raw"}).resolved


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mode", ["paper", "authors-code", "recommended"])
def test_tuned_and_released_options_are_options_of_their_algorithm(name: str, mode: str) -> None:
    task = default(name)
    assert set(task.released) <= set(task.tuned) <= set(ALGORITHMS)
    for algorithm in task.tuned:
        _ = fx.Experiment(task, algorithm, mode=mode).setup


def tuned(name: str, algorithm: str, mode: str = "paper") -> dict[str, Any]:
    return fx.Experiment(default(name), algorithm, mode=mode).setup.options()


def test_values_of_the_papers_table() -> None:
    """docs/paper.md#tuned-values: one spot check for each column and each kind of row."""
    assert tuned("emnist", "fedexp")["server.eps"] == pytest.approx(10**-1)
    assert tuned("emnist", "fedexp")["local.lr"] == pytest.approx(10**-0.5)
    assert tuned("emnist", "fedadagrad")["server.lr"] == pytest.approx(10**-0.5)
    assert tuned("cifar10", "fedexp")["server.eps"] == pytest.approx(10**-3)
    assert tuned("cifar100", "fedavg")["server.lr"] == 1.0
    assert tuned("cinic10", "scaffold")["local.lr"] == pytest.approx(10**-2)
    assert tuned("cifar10", "fedadagrad")["server.lr"] == pytest.approx(10**-1)
    assert tuned("cifar10", "fedadam")["server.lr"] == pytest.approx(10**-2)
    taus = {name: tuned(name, "fedadagrad")["server.tau"] for name in ("emnist", "cinic10")}
    assert taus == pytest.approx({"emnist": 10**-0.75, "cinic10": 0.1})  # not in the table
    assert tuned("cifar100", "fedexp-m")["server.beta"] == 0.9
    mus = {name: tuned(name, "fedprox")["client.mu"] for name in CLASSES}
    assert mus == {"emnist": 0.001, "cifar10": 0.1, "cifar100": 0.001, "cinic10": 1.0}


def test_values_of_the_released_code() -> None:
    """docs/paper.md#released-adagrad, #released-adam, #released-emnist-lr."""
    released = partial(tuned, mode="authors-code")
    assert released("emnist", "fedexp")["local.lr"] == 0.1
    assert released("emnist", "fedexp-m")["local.lr"] == pytest.approx(10**-0.5)
    assert released("emnist", "fedadagrad")["server.tau"] == pytest.approx(0.0316, abs=1e-4)
    assert released("cifar10", "fedadagrad")["server.tau"] == 0.01
    assert released("cifar10", "fedadam")["server.lr"] == 0.1
    assert released("cifar10", "fedexp")["local.lr"] == 0.01


def test_pool_and_augmentation_of_the_released_code() -> None:
    task = tasks.cifar10(pool="avg3", augment="batch")
    assert isinstance(task.transform, Images)
    assert task.transform.augment == "batch"
    kinds = [type(layer) for layer in task.objective.module.children()]  # type: ignore[attr-defined]
    assert nn.AvgPool2d in kinds
    assert nn.AdaptiveAvgPool2d not in kinds


RUNS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "emnist-cnn": (emnist_cnn, (1, 28, 28), 62),
    "cifar-cnn": (cifar_cnn, (3, 32, 32), 10),
    "resnet18": (partial(resnet18, 10), (3, 8, 8), 10),  # the smaller, the faster
    "logistic": (partial(logistic, 48, 3), (3, 4, 4), 3),
    "mlp": (partial(mlp, 48, 8, 3), (3, 4, 4), 3),
}


def tiny(name: str) -> Task:
    """Three clients with 3, 4 and 1 examples."""
    build, shape, classes = RUNS[name]
    return classification(
        name,
        build,
        Federation.from_ids(examples(8, shape, classes), [0, 0, 0, 1, 1, 1, 1, 2]),
        examples(4, shape, classes, seed=1),
        transform=Images((0.5,) * shape[0], (0.25,) * shape[0], "example"),
        local=LocalTraining(lr=0.05, steps=1, batch_size=2, weight_decay=1e-4, clip_norm=10.0),
    )


@pytest.mark.parametrize("name", RUNS)
def test_two_rounds_of_each_model(name: str) -> None:
    first, second = fx.simulate(tiny(name), fx.fedexp(), rounds=2, cohort=2, evaluate_every=2)
    assert (first.round, second.round) == (1, 2)
    assert (first.dropped, second.dropped) == (0, 0)
    assert second.test_accuracy is not None
    assert 0 <= second.test_accuracy <= 1
    assert not torch.equal(first.state.params, second.state.params)


@pytest.mark.parametrize("name", ["emnist-cnn", "cifar-cnn"])
def test_dropout_and_augmentation_follow_the_seed(name: str) -> None:
    run = partial(fx.simulate, tiny(name), fx.fedavg(), rounds=2, cohort=2)
    ends = [list(run(seed=seed))[-1].state.params for seed in (0, 0, 1)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_the_cifar_cnn_learns() -> None:
    data = splits("cifar10", 40)
    task = classification(
        "mine",
        cifar_cnn,
        Federation.from_parts(data.train, partition.iid(40, 4, np.random.default_rng(0))),
        transform=Images(*tasks.STATISTICS["cifar10"], augment=None),
        local=LocalTraining(lr=0.1, steps=3, batch_size=10),
    )
    losses = [record.train_loss for record in fx.simulate(task, fx.fedavg(), rounds=5)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_statistics_are_those_of_the_real_images(name: str) -> None:
    try:
        pixels = load(name).train["x"]
    except UsageError as missing:
        if f"{name} is not in" not in str(missing):  # damaged data are a failure
            raise
        pytest.skip(f"needs the real data: {missing}")
    channels = pixels.transpose(0, 1).flatten(1)
    counts = torch.stack([torch.bincount(c, minlength=256) for c in channels]).double()
    shares, values = counts / channels.shape[1], torch.arange(256).double() / 255
    mean = shares @ values
    std = (shares @ values.square() - mean.square()).sqrt()
    torch.testing.assert_close(
        torch.stack([mean, std]),
        torch.tensor(tasks.STATISTICS[name], dtype=torch.float64),
        rtol=0,
        atol=1e-4,
    )
