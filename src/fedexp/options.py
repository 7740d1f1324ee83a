"""Options by name: the catalogue of tasks, the `Setup` of an algorithm, and the two modes.

The command line and `spec.toml` have names and text. Here they become tasks, rules and typed
values, by the type hints of what they set; a mistake is one line that offers the nearest name.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedexp.algorithms import ALGORITHMS, RECOMMENDED_EPS, Algorithm, default_eps
from fedexp.client import SGD
from fedexp.errors import DataNote, UsageError, require, unknown_name
from fedexp.local import LocalTraining
from fedexp.references import is_reference, load_object, name_in, reference_to
from fedexp.server import AMS, Adagrad, Adam, ExP, MomentumExP, ServerRule, Yogi
from fedexp.tasks import (
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
    fed_cifar100,
    femnist,
    mnist,
    shakespeare,
    synthetic,
    toy,
)
from fedexp.tasks.task import Task, Weighting

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
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
    "mnist": mnist,
    "femnist": femnist,
    "fed-cifar100": fed_cifar100,
    "shakespeare": shakespeare,
    "emnist-small": emnist_small,
    "cifar10-small": cifar10_small,
    "cifar100-small": cifar100_small,
    "cinic10-small": cinic10_small,
}
# The released code's values, for tasks that have such an argument: docs/paper.md#released-resnet,
# docs/paper.md#released-augmentation.
RELEASED_ARGUMENTS = {"pool": "avg3", "augment": "batch"}


def build_task(task: str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper") -> Task:
    """Return a task of the package, or the user's.

    Args:
        task: one of `TASKS`, or a reference to a `Task` or to a function that returns one
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
    task: str, options: Mapping[str, Any], seed: int = 0, mode: str = "paper"
) -> dict[str, Any]:
    """Return every argument of a task's function that has a value, defaults included.

    >>> task_arguments("synthetic", {"clients": "4"}, seed=7)
    {'clients': 4, 'rows': 30, 'dim': 1000, 'seed': 7, 'normalize': True}
    """
    source = _task_or_function(task)
    if isinstance(source, Task):
        require(
            not options,
            f"{task} is a task, which has no arguments (task.{next(iter(options), '')}); let a "
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
            raise unknown_name(f"option of task {name_in(task)}", f"task.{key}", names)
        hint = hints_of(source).get(key, _hint_from(parameters[key].default))
        # as it is stored: an argument without a type has the same value when the run is resumed
        chosen[key] = convert(option_text(value), hint, f"task.{key}")
    return {key: value for key, value in chosen.items() if value is not Parameter.empty}


def _hint_from(default: Any) -> Any:
    """Return the type of an argument without a type hint; whole numbers may become fractions."""
    numbers = {bool: bool, int: int | float, float: float}
    return numbers.get(type(default), Any)


def _task_or_function(task: str) -> Task | Callable[..., Task]:
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


def split_task(text: str) -> tuple[str, str | None]:
    """Return the name of a task in records, and its reference if it is the user's.

    >>> split_task("digits")
    ('digits', None)
    """
    if not is_reference(text):
        return text, None
    source = load_object(text)
    return (source.name if isinstance(source, Task) else name_in(text)), text


def split_algorithm(text: str) -> tuple[str, str | None]:
    """Return the name of an algorithm in records, and its reference if it is the user's."""
    return (build_algorithm(text).name, text) if is_reference(text) else (text, None)


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring, without the leading "Return"."""
    line = (function.__doc__ or "").strip().splitlines()[0].removeprefix("Return ")
    return line[:1].upper() + line[1:]


SECTIONS = ("server", "client", "local")


@dataclass(frozen=True)
class Setup:
    """An algorithm, its local training and its client weights: what the options of a run change.

    Options have dotted names: `server.eps`, `client.mu`, `local.lr`, and plain `average_last` and
    `weighting`. A name without a dot is an option of the server rule, the client rule or local
    training, and refused where several have it; `lr` is always the server's.
    """

    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting = "uniform"

    def section(self, name: str) -> Any:
        """Return the dataclass that holds the options of a section."""
        found = self.local if name == "local" else getattr(self.algorithm, name)
        require(
            dataclasses.is_dataclass(found),
            f"{type(found).__name__} is no dataclass; put @dataclass(frozen=True) above it, its "
            "fields are its options",
        )
        return found

    def options(self) -> dict[str, Any]:
        """Return every option with its value, by dotted name."""
        found = {
            f"{section}.{field.name}": getattr(self.section(section), field.name)
            for section in SECTIONS
            for field in dataclasses.fields(self.section(section))
        }
        return {**found, "average_last": self.algorithm.iterates, "weighting": self.weighting}

    def with_option(self, key: str, value: Any) -> Setup:
        """Return a copy with one option changed; text is converted to the option's type.

        >>> from fedexp.algorithms import fedexp
        >>> Setup(fedexp(), LocalTraining()).with_option("eps", "0.5").algorithm.server.eps
        0.5
        """
        return self.with_options({key: value})

    def with_options(self, options: Mapping[str, Any]) -> Setup:
        """Return a copy with several options changed; they are checked together.

        Of an option that is given twice, by its short and its dotted name, the last value counts.
        Local steps replace epochs, and epochs steps; both together are refused.
        An eps has the mode that the rule has, and an eps_mode without an eps that mode's default
        where the rule's own eps has another unit: a number never changes its unit.
        """
        changes: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
        for key, value in options.items():
            full, parsed = self.parse(key, value)
            section, _, field = full.rpartition(".")
            changes[section][field] = parsed
        of_local = changes["local"]
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if of_local.get(name) is not None:  # it replaces the task's
                of_local.setdefault(other, None)
        changes["server"] |= _eps_of_mode(self.algorithm.server, changes["server"])
        weighting = changes[""].pop("weighting", self.weighting)
        changed = {
            name: replace(self.section(name), **changes[name]) for name in SECTIONS if changes[name]
        }
        local = changed.pop("local", self.local)
        return Setup(replace(self.algorithm, **changed, **changes[""]), local, weighting)

    def parse(self, key: str, value: Any) -> tuple[str, Any]:
        """Return the dotted name of an option and the value as its type."""
        full = self.full_name(key)
        section, _, field = full.rpartition(".")
        plain = {"weighting": Weighting, "average_last": int}
        hint = plain[field] if not section else hints_of(type(self.section(section)))[field]
        return full, convert(value, hint, full)

    def names_of(self, key: str) -> list[str]:
        """Return the dotted names that a name may stand for: none for an unknown one."""
        known = self.options()
        sections = ("server",) if key == "lr" else SECTIONS
        return [name for name in (key, *(f"{s}.{key}" for s in sections)) if name in known]

    def full_name(self, key: str) -> str:
        """Return the dotted name of an option; raise `UsageError` unless there is exactly one."""
        names = self.names_of(key)
        require(
            len(names) < 2,
            f"{self.algorithm.name} has {' and '.join(names)}; write which one instead of {key}",
        )
        if names:
            return names[0]
        if key == "lr":
            raise UsageError(
                f"{self.algorithm.name} has no server lr; for the clients' use local.lr"
            )
        known = self.options()
        short = {name.rpartition(".")[2] for name in known}
        raise unknown_name(f"option of {self.algorithm.name}", key, {*known, *short})


def _eps_of_mode(server: ServerRule, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the eps of a mode that is given without one, if the rule's own has another unit."""
    mode = changes.get("eps_mode")
    if not isinstance(server, ExP) or mode is None or "eps" in changes or server.eps == 0:
        return {}
    same_unit = (mode == "relative") == (server.eps_mode == "relative")
    return {} if same_unit else {"eps": default_eps(mode)}


def printed_eps(setup: Setup, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which FedExP's eps is the printed one, unless they have an eps_mode."""
    given = {setup.full_name(key) for key in options}
    is_printed = setup.algorithm.name == "fedexp" and "server.eps" in given
    if not is_printed or "server.eps_mode" in given:
        return dict(options)
    return {**options, "server.eps_mode": "absolute"}


def paper_setup(task: Task, algorithm: Algorithm) -> Setup:
    """Return the algorithm with the values that are tuned for the task, the paper's on its tasks.

    An eps among them is the printed one. FedExP without one has its default, which is relative.
    """
    setup = Setup(algorithm, task.local)
    return setup.with_options(printed_eps(setup, task.tuned.get(algorithm.name, {})))


def authors_code(task: Task, algorithm: Algorithm) -> Setup:
    """Return what the authors' released code does (docs/paper.md#released-code).

    eps times the participants, eps decayed by the square of the step-size decay, both decays before
    the first round, weights by data size, FedExP-M without its momentum, its own variants of
    FedAdagrad and FedAdam, and the task's released values. Not the accidents of a script: one round
    more than asked for (docs/paper.md#released-extra-round), NaN for a zero update
    (docs/paper.md#released-nan).
    """
    setup = paper_setup(task, algorithm)
    local = replace(setup.local, decay_before_first_round=True)
    server = _released_rule(setup.algorithm.server, local.lr_decay)
    released = Setup(replace(setup.algorithm, server=server), local, "size")
    return released.with_options(task.released.get(algorithm.name, {}))


def recommended(task: Task, algorithm: Algorithm) -> Setup:
    """Return what this project recommends: FedExP with a relative eps, the same for every task.

    The client step size is the paper's best value for the task, as in mode paper, since none can do
    without one. Where eps is 0 because all clients can fit one model (the toy and the synthetic
    problem), it stays 0. All other algorithms are those of mode paper: for the variants of FedExP
    the relative form did not meet the criteria of its study (docs/eps-study.md).
    """
    setup = paper_setup(task, algorithm)
    server, client = setup.algorithm.server, setup.algorithm.client
    if type(server) is not ExP or type(client) is not SGD:
        return setup
    eps = RECOMMENDED_EPS if server.eps else 0.0
    return setup.with_options({"server.eps": eps, "server.eps_mode": "relative"})


MODES = {"paper": paper_setup, "authors-code": authors_code, "recommended": recommended}


def setup_for(
    task: Task, algorithm: Algorithm, mode: str, options: Mapping[str, Any] | None = None
) -> Setup:
    """Return the setup of a mode by its name, with some options changed.

    An eps among them has the form of the mode, unless an eps_mode is given: the printed one in mode
    paper, times the participants in mode authors-code, and relative in mode recommended.
    """
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    return with_options(MODES[mode](task, algorithm), mode, options or {})


def with_options(setup: Setup, mode: str, options: Mapping[str, Any]) -> Setup:
    """Return the setup of a mode with options changed; see `setup_for`."""
    return setup.with_options(printed_eps(setup, options) if mode == "paper" else options)


def option_text(value: Any) -> str:
    """Return the value of an option as `--set` takes it: the inverse of `convert`.

    >>> option_text(0.1), option_text(None), option_text((1, 2)), option_text("size")
    ('0.1', 'none', '1,2', 'size')
    """
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ",".join(map(option_text, value))
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return option_text(value.item())
    if callable(value):
        return reference_to(value, getattr(value, "__name__", "function"))
    return repr(value)


def _released_rule(server: ServerRule, lr_decay: float) -> ServerRule:
    if isinstance(server, ExP):
        server = replace(
            server,
            eps=ExP.eps if server.eps_mode == "relative" else server.eps,
            eps_mode="participants",
            eps_decay=lr_decay**2,
            decay_before_first_round=True,
        )
    if isinstance(server, MomentumExP):
        return replace(server, apply_momentum=False)
    if isinstance(server, Yogi | AMS):
        return server  # not in the released code
    if isinstance(server, Adagrad):
        return replace(server, form="authors", tau=0.01)
    if isinstance(server, Adam):
        return replace(server, form="authors", tau=1e-4)
    return server


def share_options(
    setups: Mapping[str, Setup], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options of each algorithm: `name:key` is for one, `key` for all that have it.

    A note names the algorithms without an option that others have. A name that no algorithm has
    raises the error of the first algorithm. Steps for one replace epochs for all, and epochs steps.
    """
    shared: dict[str, dict[str, Any]] = {name: {} for name in setups}
    specific: dict[str, dict[str, Any]] = {name: {} for name in setups}
    general_first = sorted(options.items(), key=lambda option: ":" in option[0])
    for key, value in general_first:
        name, colon, own = key.partition(":")
        if colon and name not in setups:
            raise unknown_name(f"algorithm in option {key}", name, setups)
        takers = [name] if colon else [n for n, s in setups.items() if s.names_of(key)]
        for taker in takers or list(setups)[:1]:
            full, parsed = setups[taker].parse(own if colon else key, value)  # raises if unknown
            (specific if colon else shared)[taker][own if colon else key] = value
            other = {"local.steps": "epochs", "local.epochs": "steps"}.get(full)
            if colon and other and parsed is not None:
                for general in (other, f"local.{other}"):
                    shared[taker].pop(general, None)
        others = ", ".join(n for n in setups if n not in takers)
        if not colon and others:
            full = " or ".join(sorted({setups[n].full_name(key) for n in takers}))
            note = f"option {key} is {full} of {', '.join(takers)}; it has no effect on {others}"
            warnings.warn(note, DataNote, stacklevel=4)
    for name, setup in setups.items():
        shared[name] |= specific[name]
        try:
            setup.with_options(shared[name])
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    return shared


def split_task_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate `task.*` options (arguments of the task) from all others."""
    prefix = "task."
    of_task = {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
    return of_task, {k: v for k, v in options.items() if not k.startswith(prefix)}


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """Return `{"eps": "0.1"}` for `["eps=0.1"]`."""
    pairs: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UsageError(f"--set takes key=value, not {text!r}; for example --set eps=0.01")
        pairs.pop(key.strip(), None)  # repeated, it takes the last place
        pairs[key.strip()] = value.strip()
    return pairs


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved type hints of a dataclass or function."""
    return typing.get_type_hints(target)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return `value` as the type that `hint` asks for; text is parsed, other values are checked.

    >>> convert("0.1", float, "eps"), convert("none", int | None, "epochs"), convert("3", int, "k")
    (0.1, None, 3)
    >>> convert("abc", float, "eps")
    Traceback (most recent call last):
    fedexp.errors.UsageError: eps must be a number, not 'abc'
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_optional(value, typing.get_args(hint), name)
    if origin is Literal:
        return _convert_choice(value, typing.get_args(hint), name)
    if hint is bool:
        return _convert_bool(value, name)
    if origin is tuple:
        return _convert_tuple(value, typing.get_args(hint), name)
    if hint in (int, float):
        return _convert_number(value, hint, name)
    return Path(value) if hint is Path and isinstance(value, str) else value


def _convert_optional(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    """Convert to one of several types: None, a function (by reference), or the first that fits."""
    nothing = value is None or (isinstance(value, str) and value.lower() == "none")
    if nothing and type(None) in choices:
        return None
    functions = [each for each in choices if typing.get_origin(each) is Callable]
    if functions and isinstance(value, str) and is_reference(value):
        value = load_object(value)
    if functions and callable(value):
        return value
    kinds = [each for each in choices if each not in (type(None), *functions)]
    kinds.sort(key=lambda each: each in (str, Path))  # which take every text
    errors: list[UsageError] = []
    for kind in kinds:
        try:
            return convert(value, kind, name)
        except UsageError as error:
            errors.append(error)
    raise errors[0]


def _convert_choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    return value


def _convert_bool(value: Any, name: str) -> bool:
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return text in TRUE


def _convert_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    if len(parts) != len(kinds):
        raise UsageError(f"{name} takes {len(kinds)} numbers separated by commas, not {value!r}")
    return tuple(convert(part, kind, name) for part, kind in zip(parts, kinds, strict=True))


def _convert_number(value: Any, kind: type, name: str) -> Any:
    what = "a whole number" if kind is int else "a number"
    if kind is int and isinstance(value, str) and value.lstrip("+-").isdecimal():
        return int(value)  # not through a float, which cannot hold large ones
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be {what}, not {value!r}") from None
    whole = math.isfinite(number) and number == int(number)
    if math.isnan(number) or (kind is int and not whole):
        raise UsageError(f"{name} must be {what}, not {value!r}")
    return kind(number)
