"""Tasks: each is a function that returns a `Task`."""

from fedexp.tasks.digits import digits, digits_mlp
from fedexp.tasks.images import (
    cifar10,
    cifar10_cnn,
    cifar10_small,
    cifar100,
    cifar100_small,
    cinic10,
    cinic10_small,
    emnist,
    emnist_small,
)
from fedexp.tasks.regression import linear_regression, synthetic, toy
from fedexp.tasks.task import Task, classification

__all__ = [
    "Task",
    "cifar10",
    "cifar10_cnn",
    "cifar10_small",
    "cifar100",
    "cifar100_small",
    "cinic10",
    "cinic10_small",
    "classification",
    "digits",
    "digits_mlp",
    "emnist",
    "emnist_small",
    "linear_regression",
    "synthetic",
    "toy",
]
