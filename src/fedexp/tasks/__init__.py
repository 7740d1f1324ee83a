"""Tasks: each is a function that returns a `Task`."""

from fedexp.tasks.classification import classification
from fedexp.tasks.digits import digits, digits_mlp
from fedexp.tasks.images import cifar10, cifar10_cnn, cifar100, cinic10, emnist
from fedexp.tasks.regression import linear_regression, synthetic, toy
from fedexp.tasks.task import Task

__all__ = [
    "Task",
    "cifar10",
    "cifar10_cnn",
    "cifar100",
    "cinic10",
    "classification",
    "digits",
    "digits_mlp",
    "emnist",
    "linear_regression",
    "synthetic",
    "toy",
]
