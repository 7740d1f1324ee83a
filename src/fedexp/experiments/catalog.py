"""Names for tasks: what the command line offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from fedexp.errors import unknown_name
from fedexp.experiments.values import convert, hints_of
from fedexp.tasks import (
    Task,
    cifar10,
    cifar10_cnn,
    cifar10_small,
    cifar100,
    cifar100_small,
    cinic10,
    cinic10_small,
    digits,
    digits_mlp,
    emnist,
    emnist_small,
    synthetic,
    toy,
)

TASKS: dict[str, Callable[..., Task]] = {
    "toy": toy,
    "synthetic": synthetic,
    "digits": digits,
    "digits-mlp": digits_mlp,
    "emnist": emnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "cifar10-cnn": cifar10_cnn,
    "emnist-small": emnist_small,
    "cifar10-small": cifar10_small,
    "cifar100-small": cifar100_small,
    "cinic10-small": cinic10_small,
}
# What the released code does to a task, where the task has such an argument (audit B13, B14).
RELEASED_ARGUMENTS = {"pool": "avg3", "augment": "batch"}


def build_task(name: str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper") -> Task:
    """The task of that name; options are the arguments of its function, as text or values.

    `seed` seeds the data as well (generation, partition) where the task has any choice in it.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name](**task_arguments(name, options, seed, mode))


def task_arguments(
    name: str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper"
) -> dict[str, Any]:
    """Every argument of a task's function with its value, converted, the defaults included.

    A task that is not in the catalogue has the options that it was given.

    >>> task_arguments("synthetic", {"clients": "4"}, seed=7)
    {'clients': 4, 'rows': 30, 'dim': 1000, 'seed': 7, 'normalize': True}
    """
    if name not in TASKS:
        return dict(options)
    factory = TASKS[name]
    known = signature(factory).parameters
    given = {"seed": seed, **(RELEASED_ARGUMENTS if mode == "authors-code" else {})}
    chosen = {key: parameter.default for key, parameter in known.items()}
    chosen |= {key: value for key, value in given.items() if key in known}
    for key, value in options.items():
        if key not in known:
            raise unknown_name(
                f"option of task {name}", f"task.{key}", [f"task.{k}" for k in known]
            )
        chosen[key] = convert(value, hints_of(factory)[key], f"task.{key}")
    return {key: value for key, value in chosen.items() if value is not Parameter.empty}


def summary(function: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return (function.__doc__ or "").strip().splitlines()[0]
