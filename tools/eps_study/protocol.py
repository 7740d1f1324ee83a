"""The protocol of docs/eps-study.md as data: tasks, cells, arms, targets and criteria.

It was committed before the first run. A cell is a task with a client step size and a number of
clients per round; an arm is an algorithm with one value of its option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedexp.algorithms import (
    Algorithm,
    fedavg,
    fedavgm,
    fedexp,
    fedexp_m,
    fedprox,
    fedprox_exp,
    scaffold,
    scaffold_exp,
)
from fedexp.data.federation import Federation
from fedexp.tasks import mnist
from fedexp.tasks.images import thinned
from fedexp.tasks.task import Task

CANDIDATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)  # relative eps
ABSOLUTE = (0.0, 1e-4, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1, 10**-0.5, 1.0, 10.0)
MOST_TO_ORACLE = 1.25  # geometric mean of rounds over those of the best absolute eps
MOST_TO_FEDAVG = 1.0  # the same over FedAvg's
MNIST_CLIENTS, MNIST_TEST_IMAGES = 200, 2000

PRINTED_EPS = 1e-3  # the absolute default that a variant had when its protocol was written
VARIANT_CONSTANT = 0.05  # selected for FedExP; nothing is selected on a variant
VARIANT_TASKS = ("digits", "digits-mlp", "mnist-200")  # that the decision on a variant waits for
MOST_TO_PRINTED = 1.0  # geometric mean of rounds over those of the printed default

Kind = Literal["fedavg", "relative", "absolute"]


@dataclass(frozen=True)
class Variant:
    """An extrapolating algorithm, and the algorithm that it is without extrapolation.

    Attributes:
        name: its name in tables.
        base: the algorithm without extrapolation, server step size 1.
        extrapolated: returns it with an eps and an eps_mode.
    """

    name: str
    base: Algorithm
    extrapolated: Callable[..., Algorithm]


FEDEXP = "fedexp"
VARIANTS = {
    FEDEXP: Variant("FedExP", fedavg(lr=1.0), fedexp),
    "fedprox-exp": Variant("FedProx-ExP", fedprox(lr=1.0), fedprox_exp),
    "scaffold-exp": Variant("SCAFFOLD-ExP", scaffold(lr=1.0), scaffold_exp),
    "fedexp-m": Variant("FedExP-M", fedavgm(lr=1.0), fedexp_m),
}


@dataclass(frozen=True)
class Arm:
    """An algorithm of the study.

    Attributes:
        kind: without extrapolation ("fedavg", the base of a variant), or with a relative or an
            absolute eps.
        eps: its value; 0 without extrapolation.
    """

    kind: Kind
    eps: float = 0.0

    def algorithm(self, variant: str = FEDEXP) -> Algorithm:
        """Return the algorithm to run."""
        if self.kind == "fedavg":
            return VARIANTS[variant].base
        return VARIANTS[variant].extrapolated(eps=self.eps, eps_mode=self.kind)


@dataclass(frozen=True)
class Cell:
    """A task with a client step size and a number of clients per round (0 for all)."""

    task: str
    local_lr: float
    cohort: int


@dataclass(frozen=True)
class StudyTask:
    """A task of the study.

    Attributes:
        name: its name.
        selects: whether the constant is chosen on it; it is confirmed on the others.
        task: its name in `fedexp`, or a reference.
        target: value of `metric` to reach.
        budget: rounds after which a run counts as one that does not reach it.
        evaluate_every: rounds between evaluations.
        seeds: seeds of every cell, in the order of execution.
        grid: client step sizes and clients per round, in the order of execution.
        absolute: values of the absolute eps for a client step size.
        metric: the record field that is to reach the target.
    """

    name: str
    selects: bool
    task: str
    target: float
    budget: int
    evaluate_every: int
    seeds: tuple[int, ...]
    grid: tuple[tuple[float, int], ...]
    absolute: Callable[[float], tuple[float, ...]] = lambda lr: ABSOLUTE
    metric: str = "test_accuracy"

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of execution."""
        return [Cell(self.name, lr, cohort) for lr, cohort in self.grid]

    def arms(self, cell: Cell, constants: Sequence[float]) -> list[Arm]:
        """Return the arms of a cell with these relative eps, FedAvg last: it takes longest."""
        absolute = [Arm("absolute", eps) for eps in self.absolute(cell.local_lr)]
        return [*(Arm("relative", c) for c in constants), *absolute, Arm("fedavg")]


def times_square(*factors: float) -> Callable[[float], tuple[float, ...]]:
    """Return absolute eps in proportion to the square of the client step size, as updates are."""
    return lambda lr: tuple(float(f"{factor * lr**2:.6g}") for factor in factors)


def mnist_200(seed: int) -> Task:
    """Return the first 200 of mnist's 1,000 clients and 2,000 of its test images."""
    task = mnist(seed=seed)
    ends = task.train.offsets[: MNIST_CLIENTS + 1]
    fields = {name: value[: ends[-1]] for name, value in task.train.fields.items()}
    assert task.test is not None
    test = thinned(task.test, MNIST_TEST_IMAGES)
    return replace(task, name="mnist-200", train=Federation(fields, ends), test=test)


def factorial(steps: Sequence[float], cohorts: Sequence[int]) -> tuple[tuple[float, int], ...]:
    """Return every client step size with every cohort, one cohort after another."""
    return tuple((lr, cohort) for cohort in cohorts for lr in steps)


HALF_DECADES, LARGE = (10**-1.5, 0.1, 10**-0.5), (0.1, 10**-0.5, 1.0)
TENTHS = (0.01, 10**-1.5, 0.1)
CIFAR10 = ((0.01, 20), (0.01, 10), (10**-1.5, 20), (10**-2.5, 20))
SHAKESPEARE = ((1.0, 10), (10**-0.5, 10), (0.1, 10), (1.0, 20))
MNIST = "tools.eps_study.protocol:mnist_200"
# name, whether it selects, task, target, budget, evaluated every, seeds, grid
TASKS = {
    task.name: task
    for task in (
        StudyTask("digits", True, "digits", 0.94, 150, 1, (0, 1, 2), factorial(LARGE, (5, 20))),
        StudyTask(
            *("digits-mlp", True, "digits-mlp", 0.94, 150, 1, (0, 1, 2)), factorial(LARGE, (5, 20))
        ),
        StudyTask(
            *("synthetic", True, "synthetic", 1e-5, 500, 1, (0, 1, 2), factorial(TENTHS, (10, 0))),
            metric="train_loss",
        ),
        StudyTask("mnist-200", True, MNIST, 0.80, 150, 3, (0, 1), factorial(TENTHS, (5, 20))),
        StudyTask(
            *("emnist", False, "emnist", 0.84, 250, 5, (0, 1), factorial(HALF_DECADES, (20, 10))),
            absolute=times_square(1, 10**0.5, 10, 10**1.5, 100),
        ),
        StudyTask(
            *("cifar10", False, "cifar10", 0.55, 200, 5, (0, 1), CIFAR10),
            absolute=times_square(10**0.5, 10, 10**1.5),
        ),
        StudyTask(
            *("shakespeare", False, "shakespeare", 0.45, 400, 10, (0, 1), SHAKESPEARE),
            absolute=lambda lr: (1e-3, 1e-2, 1e-1, 1.0, 10.0),
        ),
    )
}
