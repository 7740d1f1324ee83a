"""What server and clients must agree on, from the run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
from flwr.app import Context
from torch import nn

from fedexp.algorithms import ALGORITHMS
from fedexp.catalogue import TASKS, build_task
from fedexp.data.federation import Batch
from fedexp.engine.plan import Work
from fedexp.errors import UsageError, unknown_name
from fedexp.modes import paper_setup
from fedexp.objective import ModuleObjective
from fedexp.options import Setup
from fedexp.tasks.task import Task
from fedexp.text import parse_assignments


def task_of(context: Context) -> Task:
    """The data and the model. Put your own here: `fedexp.tasks.task` makes a task."""
    config = context.run_config
    return load_task(str(config["task"]), int(config["clients"]), int(config["seed"]))


def model_of(task: Task) -> nn.Module:
    """A module whose weights are still to be loaded."""
    assert isinstance(task.objective, ModuleObjective)
    return task.objective.build()


def setup_of(context: Context, task: Task) -> Setup:
    """The algorithm and the settings of local training."""
    config = context.run_config
    name = str(config["algorithm"])
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    setup = paper_setup(task, ALGORITHMS[name]())
    options: dict[str, Any] = parse_assignments(str(config["set"]).split())
    if config["lr"] != "auto":
        options["local.lr"] = config["lr"]
    if config["eps"] != "auto":
        options["eps"] = config["eps"]
    return setup.with_options(options)


def batches_of(task: Task, setup: Setup, seed: int, round: int, client: int) -> Iterator[Batch]:
    """The batches of a client in a round: those that `fedexp run` would take. Or any others."""
    cohort = np.array([client])
    work = Work(task, setup.algorithm, setup.local, setup.weighting, seed, round, cohort)
    return work.batches(client)


@cache
def load_task(name: str, clients: int, seed: int) -> Task:
    """A task of the package by name, its data dealt to so many clients where they can be."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    dealt = "clients" in signature(TASKS[name]).parameters  # EMNIST's clients are its writers
    task = build_task(name, {"clients": clients} if dealt else {}, seed)
    if not isinstance(task.objective, ModuleObjective):
        raise UsageError(f"{name} trains no torch module; choose another task, e.g. digits")
    return task
