"""The tasks of the paper: their data, dealt to clients, and the values that it found best."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import Context

import fedexp as fx


def experiment_of(context: Context) -> fx.Experiment:
    """Return the task, the algorithm and the local training that the configuration names."""
    config = context.run_config
    names = (str(config[name]) for name in ("task", "algorithm", "options"))
    return _experiment(*names, int(config["seed"]))


@cache
def _experiment(task: str, algorithm: str, options: str, seed: int) -> fx.Experiment:
    changes = dict(entry.partition("=")[::2] for entry in options.split())
    exact = fx.Experiment(task, algorithm, seed, options=changes).resolved
    if not torch.cuda.is_available():
        return exact
    return exact.replace(task=exact.problem.to(torch.device("cuda"), "tf32"))
