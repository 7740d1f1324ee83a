"""The catalogue of tasks, and the task or algorithm of a name or reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, get_type_hints

from fedexp import tasks
from fedexp.algorithms import ALGORITHMS, Algorithm
from fedexp.errors import require, unknown_name
from fedexp.references import is_reference, load_object, name_in, reference_to
from fedexp.tasks.task import Task
from fedexp.text import convert, option_text

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
TASKS: dict[str, Callable[..., Task]] = {
    "toy": tasks.toy,
    "synthetic": tasks.synthetic,
    "digits": tasks.digits,
    "digits-mlp": tasks.digits_mlp,
    "emnist": tasks.emnist,
    "cifar10": tasks.cifar10,
    "cifar100": tasks.cifar100,
    "cinic10": tasks.cinic10,
    "cifar10-cnn": tasks.cifar10_cnn,
    "mnist": tasks.mnist,
    "femnist": tasks.femnist,
    "fed-cifar100": tasks.fed_cifar100,
    "shakespeare": tasks.shakespeare,
    "tinygpt": tasks.tinygpt,
    "emnist-small": tasks.emnist_small,
    "cifar10-small": tasks.cifar10_small,
    "cifar100-small": tasks.cifar100_small,
    "cinic10-small": tasks.cinic10_small,
}
# The released code's values, for tasks that have such an argument: docs/paper.md#released-resnet,
# docs/paper.md#released-augmentation.
RELEASED_ARGUMENTS = {"pool": "avg3", "augment": "batch"}


def build_task(
    task: Task | str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper"
) -> Task:
    """Return a task of the package, or the user's.

    Args:
        task: a task; one of `TASKS`; or a reference to a `Task` or to a function that returns one
            (`study.py:task`).
        options: arguments of the function, as text or values.
        seed: seed of the data (generation, partition) where the task draws any.
        mode: "authors-code" for the arguments of the released code.
    """
    arguments = task_arguments(task, options, seed, mode)
    source = _task_or_function(task)
    if isinstance(source, Task):
        return source
    named = [p for p in signature(source).parameters.values() if p.kind not in VARIADIC]
    missing = next((p.name for p in named if p.name not in arguments), None)
    require(missing is None, f"{task} needs --set task.{missing}=..., or a default")
    built = source(**arguments)
    require(
        isinstance(built, Task),
        f"{task} returns {type(built).__name__}, not a Task; return the result of "
        "fedexp.supervised or fedexp.classification",
    )
    return built


def task_arguments(
    task: Task | str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper"
) -> dict[str, Any]:
    """Return every argument of a task's function that has a value, defaults included.

    >>> task_arguments("synthetic", {"clients": "4"}, seed=7)
    {'clients': 4, 'rows': 30, 'dim': 1000, 'seed': 7, 'normalize': True}
    """
    source, called = _task_or_function(task), task.name if isinstance(task, Task) else task
    if isinstance(source, Task):
        require(
            not options,
            f"{called} is a task, which has no arguments (task.{next(iter(options), '')}); let a "
            "function return it, and name the function",
        )
        return {}
    parameters = signature(source).parameters
    usual = {"seed": seed, **(RELEASED_ARGUMENTS if mode == "authors-code" else {})}
    chosen = {key: parameter.default for key, parameter in parameters.items()}
    chosen |= {key: value for key, value in usual.items() if key in parameters}
    for key, value in options.items():
        if key not in parameters:
            names = [f"task.{name}" for name in parameters]
            raise unknown_name(f"option of task {name_in(called)}", f"task.{key}", names)
        hint = get_type_hints(source).get(key, _hint_from(parameters[key].default))
        # as it is stored: an argument without a type has the same value when the run is resumed
        chosen[key] = convert(option_text(value), hint, f"task.{key}")
    return {key: value for key, value in chosen.items() if value is not Parameter.empty}


def _hint_from(default: Any) -> Any:
    """Return the type of an argument without a type hint; whole numbers may become fractions."""
    numbers = {bool: bool, int: int | float, float: float}
    return numbers.get(type(default), Any)


def _task_or_function(task: Task | str) -> Task | Callable[..., Task]:
    if isinstance(task, Task):
        return task
    if not is_reference(task):
        require(not task.endswith(".py"), f"{task} is a file; name a task in it, e.g. {task}:task")
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
        return TASKS[task]
    source = load_object(task)
    require(
        isinstance(source, Task) or (callable(source) and not isinstance(source, type)),
        f"{task} is {type(source).__name__}, not a Task or a function that returns one",
    )
    task_or_function: Task | Callable[..., Task] = source
    return task_or_function


def build_algorithm(algorithm: str) -> Algorithm:
    """Return an algorithm of the package with its defaults, or the user's.

    Args:
        algorithm: one of `ALGORITHMS`, or a reference to an `Algorithm` or to a function that
            returns one (`study.py:mine`).
    """
    if not is_reference(algorithm):
        if algorithm not in ALGORITHMS:
            raise unknown_name("algorithm", algorithm, ALGORITHMS)
        return ALGORITHMS[algorithm]()
    source = load_object(algorithm)
    built = source() if callable(source) and not isinstance(source, type) else source
    require(
        isinstance(built, Algorithm),
        f"{algorithm} is {type(built).__name__}, not an Algorithm or a function that returns one; "
        'make it with fedexp.Algorithm("name", client=..., server=...)',
    )
    return built


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring, without the leading "Return"."""
    line = (function.__doc__ or "").strip().splitlines()[0].removeprefix("Return ")
    return line[:1].upper() + line[1:]


def named_task(task: Task | str) -> tuple[str, str | None]:
    """Return the name of a task in records, and its reference if it is the user's.

    >>> named_task("digits")
    ('digits', None)
    """
    if isinstance(task, Task):
        return task.name, reference_to(task, task.name)
    if not is_reference(task):
        return task, None
    source = load_object(task)
    return (source.name if isinstance(source, Task) else name_in(task)), task


def named_algorithm(algorithm: Algorithm | str) -> tuple[str, str | None]:
    """Return the name of an algorithm in records, and its reference if it is the user's."""
    if isinstance(algorithm, str):
        is_users = is_reference(algorithm)
        return (build_algorithm(algorithm).name, algorithm) if is_users else (algorithm, None)
    if algorithm.name in ALGORITHMS:  # one of the package, perhaps with other values
        usual = ALGORITHMS[algorithm.name]()
        kinds = type(algorithm.client), type(algorithm.server)
        if kinds == (type(usual.client), type(usual.server)):
            return algorithm.name, None
    return algorithm.name, reference_to(algorithm, algorithm.name)
