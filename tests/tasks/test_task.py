"""`classification`: a task from a model and data, and the errors for unusable ones."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.data import partition
from fedexp.data.federation import Federation
from fedexp.errors import UsageError
from fedexp.tasks.supervised import classification


def test_your_own_data_in_five_lines() -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32), np.arange(90) % 3
    parts = partition.dirichlet_unequal(y, clients=5, alpha=0.5, rng=np.random.default_rng(0))
    mine = Federation.from_parts({"x": x, "y": y}, parts)
    task = classification("mine", lambda: nn.Linear(4, 3), mine)
    records = list(fx.simulate(task, fx.fedexp(), rounds=2))
    assert records[-1].train_accuracy is not None
    assert records[-1].test_accuracy is None
    assert task.metric == "train_accuracy"


def federation(x: Any, y: Any) -> Federation:
    return Federation.from_parts({"x": torch.as_tensor(x), "y": torch.as_tensor(y)}, [np.arange(2)])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0.0, 1.0], "float32 of shape .2., not int64 class numbers"),
        ([True, False], "bool of shape"),
        ([[1, 0], [0, 1]], "int64 of shape .2, 2.*one per example"),
        ([1, 3], "go from 1 to 3, but the model has the classes 0 to 2.*4 classes"),
        ([-1, 0], "number the labels from 0"),
    ],
)
def test_labels_that_are_not_class_numbers_are_refused(y: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        classification("mine", lambda: nn.Linear(4, 3), federation(torch.zeros(2, 4), y))


def test_test_data_are_checked_as_well() -> None:
    train = federation(torch.zeros(2, 4), [0, 1])
    for test, message in (
        ({"x": torch.zeros(2, 4), "y": torch.tensor([0, 7])}, "test labels go from 0 to 7"),
        ({"x": torch.zeros(2, 4)}, "the test data has no field y"),
        ({"x": torch.zeros(0, 4), "y": torch.zeros(0, dtype=torch.int64)}, "no examples"),
        ({"x": torch.zeros(3, 4), "y": torch.tensor([0, 1])}, "3 rows in x but 2 in y"),
    ):
        with pytest.raises(UsageError, match=message):
            classification("mine", lambda: nn.Linear(4, 3), train, test)


def test_bytes_without_a_transform_are_refused() -> None:
    train = federation(torch.zeros(2, 4, dtype=torch.uint8), [0, 1])
    with pytest.raises(UsageError, match="pass transform=Images"):
        classification("mine", lambda: nn.Linear(4, 3), train)


def test_a_model_without_class_scores_is_refused() -> None:
    train = federation(torch.zeros(2, 4), [0, 1])
    with pytest.raises(
        UsageError, match=r"shape \[examples, classes\], not float32 of shape \[1, 1, 4\]"
    ):
        classification(
            "mine", lambda: nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 4))), train
        )
