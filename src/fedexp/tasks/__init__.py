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
from fedexp.tasks.metrics import Mean, Metric
from fedexp.tasks.recipe import Goal, parse_goal
from fedexp.tasks.regression import linear_regression, synthetic, toy
from fedexp.tasks.shakespeare import shakespeare
from fedexp.tasks.standard import fed_cifar100, femnist, mnist
from fedexp.tasks.supervised import classification, supervised
from fedexp.tasks.task import Task
from fedexp.tasks.tinygpt import tinygpt

__all__ = [
    "Goal",
    "Mean",
    "Metric",
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
    "fed_cifar100",
    "femnist",
    "linear_regression",
    "mnist",
    "parse_goal",
    "shakespeare",
    "supervised",
    "synthetic",
    "tinygpt",
    "toy",
]
