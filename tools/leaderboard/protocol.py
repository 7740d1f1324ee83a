"""The protocol of docs/leaderboard.md as data: tasks, targets, rows and the grid of each row.

It was committed before the first run. A row is an algorithm; on tuned tasks it has `TRIALS` points:
the client step sizes of the task times three values of one option of the algorithm. A row without
such an option has as many client step sizes in the same range. To add an algorithm, add an `Entry`
to `ENTRIES`; its `algorithm` may be a reference (`study.py:mine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedexp.catalogue import build_algorithm
from fedexp.errors import require
from fedexp.experiment import Experiment
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.references import is_reference

TRIALS = 9  # points per row and tuned task
TUNING_SEED = 0
SEEDS = (0, 1, 2)  # of the judged runs
LAST = 5  # evaluations whose mean is the final accuracy; a smoothed crossing has as many
Point = dict[str, float]


@dataclass(frozen=True)
class BoardTask:
    """A task of the leaderboard.

    Attributes:
        name: its name.
        title: as the page writes it.
        task: its name in `fedexp`, or a reference.
        targets: two test accuracies to reach, the lower one first.
        rounds: of a judged run.
        evaluate_every: rounds between evaluations of a judged run.
        cohort: clients per round.
        local_lr: base-10 logarithms of the smallest, middle and largest client step size.
        tuned: whether rows are tuned; otherwise they have the paper's values.
        worst: the split of the worst-decile accuracy: "test" where test examples belong to clients.
        clients: how many it must have; None for any number.
    """

    name: str
    title: str
    task: str
    targets: tuple[float, float]
    rounds: int
    evaluate_every: int
    cohort: int
    local_lr: tuple[float, float, float]
    tuned: bool = True
    worst: str = "train"
    clients: int | None = None


CIFAR = (-2.0, -2.0, -2.0)  # not tuned: the paper's client step size
# name, title, task, targets, rounds, evaluated every, cohort, logarithms of client step sizes
TASKS = {
    task.name: task
    for task in (
        BoardTask("digits", "digits (MLP)", "digits-mlp", (0.92, 0.94), 150, 1, 10, (-1, -0.5, 0)),
        BoardTask(
            *("emnist", "EMNIST, 294 writers", "emnist", (0.80, 0.84), 250, 5, 20, (-1, -0.5, 0)),
            clients=294,
        ),
        BoardTask(
            *("shakespeare", "Shakespeare (LSTM)", "shakespeare", (0.45, 0.50), 300, 10, 10),
            local_lr=(-0.5, 0, 0.5),
            worst="test",
        ),
        BoardTask("cifar10", "CIFAR-10", "cifar10", (0.55, 0.72), 500, 5, 20, CIFAR, tuned=False),
        BoardTask("cifar100", "CIFAR-100", "cifar100", (0.3, 0.4), 500, 5, 20, CIFAR, tuned=False),
    )
}
SMALL = tuple(name for name, task in TASKS.items() if task.tuned)  # that every row is for


@dataclass(frozen=True)
class Entry:
    """A row of the leaderboard.

    Attributes:
        name: of the row, on the command line and in files.
        title: as the page writes it.
        algorithm: a name of `fedexp algorithms`, or a reference to an algorithm (`study.py:mine`).
        option: the option that is tuned beside the client step size; None for none.
        centres: by task, the base-10 logarithm of the middle value of the option; the row is run on
            these tasks. Of a row without an option the values are not used.
        spacing: decades between two values: 0.5 for step sizes, 1 for eps and mu, as in the paper.
        fixed: further options, for all tasks.
        by_task: further options by task.
    """

    name: str
    title: str
    algorithm: str
    option: str | None
    centres: Mapping[str, float]
    spacing: float = 0.5
    fixed: Mapping[str, Any] = field(default_factory=dict)
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def points(self, task: str) -> list[Point]:
        """Return the points of the grid: the client step size varies slowest.

        On a task that is not tuned there is one point, the middle.
        """
        low, middle, high = TASKS[task].local_lr
        centre = self.centres[task]
        if not TASKS[task].tuned:
            option = {} if self.option is None else {self.option: power(centre)}
            return [{"local.lr": power(middle), **option}]
        if self.option is None:
            step = (high - low) / (TRIALS - 1)
            return [{"local.lr": power(low + k * step)} for k in range(TRIALS)]
        values = [power(centre + k * self.spacing) for k in (-1, 0, 1)]
        steps = [power(log) for log in (low, middle, high)]
        return [{"local.lr": lr, self.option: value} for lr in steps for value in values]

    def setup(self, local: LocalTraining, task: str, point: Point) -> Setup:
        """Return the algorithm and local training at a point, given the task's local training."""
        return Setup(build_algorithm(self.algorithm), local).with_options(self.options(task, point))

    def options(self, task: str, point: Point) -> dict[str, Any]:
        """Return all options at a point."""
        return {**self.fixed, **self.by_task.get(task, {}), **point}

    def experiment(self, task: str, point: Point, seed: int, **settings: Any) -> Experiment:
        """Return the run of a seed at a point; raise `UsageError` for other data."""
        board, algorithm = TASKS[task], self.algorithm
        run = Experiment(
            board.task,
            algorithm if is_reference(algorithm) else build_algorithm(algorithm),
            seed,
            cohort=board.cohort,
            options=self.options(task, point),
            **settings,
        )
        if board.clients is not None:
            clients = run.problem.train.clients
            require(
                clients == board.clients,
                f"the leaderboard has {board.title}, not {clients}; set FEDEXP_DATA to the folder "
                "of that edition",
            )
        return run


def power(log: float) -> float:
    """Return a power of ten with six digits, the same on every machine.

    >>> power(-0.5), power(0)
    (0.316228, 1.0)
    """
    return float(f"{10.0**log:.6g}")


def small(
    digits: float, emnist: float, shakespeare: float, cifar10: float | None = None
) -> dict[str, float]:
    """Return the middles of a row; with `cifar10`, it was added after its run there was seen."""
    centres = {"digits": digits, "emnist": emnist, "shakespeare": shakespeare}
    return centres if cifar10 is None else {**centres, "cifar10": cifar10}


def every(digits: float, emnist: float, shakespeare: float, cifar: float) -> dict[str, float]:
    return {**small(digits, emnist, shakespeare, cifar), "cifar100": cifar}


RELATIVE = {"server.eps_mode": "relative", "server.eps": 0.05}
TAUS = {"emnist": power(-0.75), "shakespeare": 0.1, "cifar10": 0.1, "cifar100": 0.1}
TAU = {task: {"server.tau": tau} for task, tau in TAUS.items()}  # as in the recipes, or the default
MUS = {"digits": 0.01, "emnist": 0.001, "shakespeare": 0.01}
MU = {task: {"client.mu": mu} for task, mu in MUS.items()}  # of FedProx; another option is tuned
EXPROX_MU = {**MU, "digits": {"client.mu": 0.1}}
DELTA = {"local.optimizer": "delta-sgd"}
TWO = 0.30103  # the logarithm of 2, the published gamma of Delta-SGD


# name, title, algorithm, option, middle of its grid by task, spacing in decades
ENTRIES = {
    row.name: row
    for row in (
        Entry("fedavg", "FedAvg", "fedavg", "server.lr", every(0, 0, 0.5, 0)),
        Entry("fedexp", "FedExP, recommended", "fedexp", None, every(0, 0, 0, 0), fixed=RELATIVE),
        Entry(
            *("fedexp-printed", "FedExP, printed", "fedexp", "server.eps"),
            *(every(-2.5, -1, -3, -3), 1, {"server.eps_mode": "absolute"}),
        ),
        Entry("scaffold", "SCAFFOLD", "scaffold", "server.lr", every(0.5, 0, 0.5, 0)),
        Entry("fedadam", "FedAdam", "fedadam", "server.lr", every(-1, -2, -1, -2)),
        Entry(
            *("fedadagrad", "FedAdagrad", "fedadagrad", "server.lr", every(-0.5, -0.5, -0.5, -1)),
            by_task=TAU,
        ),
        Entry("fedavgm", "FedAvg-M", "fedavgm", "server.lr", small(0, 0, -0.5, 0)),
        Entry("diloco", "DiLoCo, outer step", "diloco", "server.lr", small(0, 0, -0.5)),
        Entry("fedexp-m", "FedExP-M", "fedexp-m", "server.eps", small(-1, -1, -3, -3), 1),
        Entry(
            "scaffold-exp", "SCAFFOLD-ExP", "scaffold-exp", "server.eps", small(-3, -1, -3, -3), 1
        ),
        Entry("fedprox", "FedProx", "fedprox", "client.mu", small(-2, -3, -2), 1),
        Entry(
            *("fedprox-exp", "FedProx-ExP", "fedprox-exp", "server.eps", small(-2.5, -1, -3), 1),
            by_task=MU,
        ),
        Entry("fedyogi", "FedYogi", "fedyogi", "server.lr", small(-1, -2, -1)),
        Entry("fedams", "FedAMS", "fedams", "server.lr", small(-1, -2, -1)),
        Entry(
            *("fedexprox", "FedExProx", "fedexprox", "server.lr", small(0.5, 0.5, 0.5)),
            by_task=EXPROX_MU,
        ),
        Entry(
            *("fedexprox-grads", "FedExProx-GraDS", "fedexprox-grads", "client.mu"),
            *(small(-3, -3, -2), 1),
        ),
        Entry(
            *("fedexprox-stops", "FedExProx-StoPS", "fedexprox-stops", "client.mu"),
            *(small(-1, -1, -1), 1),
        ),
        Entry("fedhyper", "FedHyper-G", "fedhyper", "server.lr", small(0, 0, 0)),
        Entry("fednova", "FedNova", "fednova", "server.lr", small(0, 0, 0.5)),
        Entry(
            *("delta-sgd", "FedAvg + Delta-SGD", "fedavg", "local.delta_gamma"),
            small(TWO, TWO, TWO),
            fixed=DELTA,
        ),
    )
}
