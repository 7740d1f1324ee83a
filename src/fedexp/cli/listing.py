"""`fedexp algorithms` and `fedexp tasks`: lists with the options that --set can change."""

from __future__ import annotations

import argparse
from inspect import signature
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.local import LocalTraining
from fedexp.options import TASKS, Setup, summary


def add_parser(subparsers: Any) -> None:
    """Add both commands to the sub-parsers of the command line."""
    algorithms = subparsers.add_parser("algorithms", help="list the algorithms and their options")
    algorithms.set_defaults(run=list_algorithms)
    tasks = subparsers.add_parser("tasks", help="list the tasks and their options")
    tasks.set_defaults(run=list_tasks)


def list_algorithms(args: argparse.Namespace) -> int:
    """Print every algorithm with its options."""
    for name, build in ALGORITHMS.items():
        options = Setup(build(), LocalTraining()).options().items()
        own = [f"{k.rpartition('.')[2]}={v}" for k, v in options if not k.startswith("local.")]
        _entry(name, summary(build), own)
    local = Setup(ALGORITHMS["fedavg"](), LocalTraining()).options().items()
    _entry("any", "Local training.", [f"{k}={v}" for k, v in local if k.startswith("local.")])
    return 0


def list_tasks(args: argparse.Namespace) -> int:
    """Print every task with its options."""
    for name, build in TASKS.items():
        defaults = signature(build).parameters.values()
        _entry(name, summary(build), [f"task.{p.name}={p.default}" for p in defaults])
    return 0


def _entry(name: str, what: str, options: list[str]) -> None:
    print(f"{name:<14} {what}")
    print(f"{'':<14} --set {' '.join(options)}")
