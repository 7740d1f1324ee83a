"""Specs from Python objects: what `fedexp.run`, `compare` and `tune` are given becomes a `Spec`.

Objects that a name describes (an algorithm of the package with other values) become names and
options, others a reference to where they are defined, so that a run can be resumed from its folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from operator import index
from typing import Any, TypedDict

from torch import Tensor, nn

from fedexp.algorithms import ALGORITHMS, Algorithm
from fedexp.cohorts import Cohort
from fedexp.engine import EngineName, Record
from fedexp.errors import UsageError, require, shown, unknown_name
from fedexp.local import LocalTraining
from fedexp.options import Setup, build_algorithm, option_text, split_algorithm, split_task
from fedexp.precision import Precision
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy
from fedexp.references import reference_to
from fedexp.runs.spec import Run, Spec
from fedexp.runs.weights import stored_start
from fedexp.tasks.task import Task, Weighting

PathLike = str | os.PathLike[str]


class Settings(TypedDict, total=False):
    """Options that `run`, `compare` and `tune` share; None is the task's own everywhere.

    Attributes:
        rounds: number of rounds.
        cohort: clients per round: a number, a fraction, "all", a list of clients, or a function
            (rng, round, federation) that returns them.
        local: local training, instead of the task's.
        weighting: "uniform", or "size" to weigh clients by their examples.
        options: single options by name, as `--set` takes them: {"eps": 0.01, "local.lr": 0.1}.
        mode: "paper" or "authors-code".
        evaluate_every: rounds between evaluations.
        engine: see `simulate`.
        device: e.g. "cuda".
        precision: "float32", "tf32" or "bf16".
        stop_at: value of the task's metric at which a run ends early.
        deterministic: use deterministic torch operations only.
        start: weights that training begins with: a record, a module, a state_dict, a run folder or
            a safetensors file.
        privacy: simulated differential privacy, see docs/privacy.md.
        by_client: also evaluate every client, for the worst decile.
    """

    rounds: int | None
    cohort: Cohort | None
    local: LocalTraining | None
    weighting: Weighting | None
    options: Mapping[str, Any] | None
    mode: str
    evaluate_every: int | None
    engine: EngineName
    device: str | None
    precision: Precision | None
    stop_at: float | None
    deterministic: bool
    start: Record | nn.Module | Mapping[str, Tensor] | PathLike | None
    privacy: CentralPrivacy | LocalPrivacy | None
    by_client: bool


KINDS: tuple[tuple[str, Any, str], ...] = (  # of settings whose type would fail later
    ("local", LocalTraining, "fedexp.LocalTraining(lr=...)"),
    ("options", Mapping, 'values by name, e.g. {"eps": 0.01}'),
    (
        "privacy",
        CentralPrivacy | LocalPrivacy,
        "fedexp.privacy.CentralPrivacy(...) or LocalPrivacy(...)",
    ),
)


def prepared_runs(
    task: Task | str,
    algorithms: Sequence[Algorithm | str],
    seed: int,
    settings: Settings,
    runs: PathLike | None,
) -> list[Run]:
    """Return a run of each algorithm over one task; `name:key` options are for one algorithm."""
    options = dict(settings.get("options") or {})
    general = {key: value for key, value in options.items() if ":" not in key}
    firsts: list[Run] = []
    for algorithm in algorithms:
        bare = spec_for(task, algorithm, seed, {**settings, "options": {}}, runs)
        built = firsts[0].task if firsts else None
        setup = bare.prepare(built).setup
        own = {k: v for k, v in general.items() if k.startswith("task.") or setup.has_option(k)}
        prefix = f"{bare.algorithm}:"
        own |= {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
        firsts.append(_with_options(bare, own).prepare(None if _of_task(own) else built))
    names = [first.spec.algorithm for first in firsts]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(
        twice is None,
        f"two algorithms are called {twice!r}; give one another name, e.g. "
        'dataclasses.replace(algorithm, name="...")',
    )
    known = {key for first in firsts for key in general if first.setup.has_option(key)}
    for key in general:
        if key not in known and not key.startswith("task."):
            firsts[0].setup.full_name(key)  # raises, naming the nearest option
    for key in options.keys() - general.keys():
        name = key.partition(":")[0]
        require(name in names, f"options has {key!r}, but no algorithm is called {name!r}")
    return firsts


def spec_for(
    task: Task | str,
    algorithm: Algorithm | str,
    seed: int,
    settings: Settings,
    runs: PathLike | None = None,
) -> Spec:
    """Return the spec of a run of these objects."""
    unknown = next((key for key in settings if key not in Settings.__annotations__), None)
    if unknown is not None:
        raise unknown_name("argument", unknown, Settings.__annotations__)
    for key, kinds, example in KINDS:
        value: Any = settings.get(key)
        require(
            value is None or isinstance(value, kinds),
            f"{key} is {type(value).__name__}; give {example}",
        )
    if isinstance(task, str):
        task_name, task_source = split_task(task)
    else:
        require(
            isinstance(task, Task),
            f"the task is {type(task).__name__}, not a Task; make one with fedexp.supervised, or "
            'give the name of one, e.g. "digits"',
        )
        task_name, task_source = task.name, reference_to(task, task.name)
    name, source = _named_algorithm(algorithm)
    start = settings.get("start")
    bare = Spec(
        task=task_name,
        algorithm=name,
        seed=_whole(seed, "seed"),
        rounds=_whole(settings.get("rounds"), "rounds"),
        cohort=_cohort(settings.get("cohort")),
        mode=settings.get("mode") or "paper",
        evaluate_every=_whole(settings.get("evaluate_every"), "evaluate_every"),
        engine=settings.get("engine") or "auto",
        device=settings.get("device"),
        precision=settings.get("precision"),
        stop_at=settings.get("stop_at"),
        deterministic=settings.get("deterministic") or False,
        task_source=task_source,
        algorithm_source=source,
        start=None if start is None else stored_start(start, runs),
        privacy=settings.get("privacy"),
        by_client=settings.get("by_client") or False,
    )
    local, weighting = settings.get("local"), settings.get("weighting")
    given = dict(settings.get("options") or {})
    if isinstance(algorithm, Algorithm) or local is not None or weighting is not None:
        built = _with_options(bare, _of_task(given)).prepare()
        named = built.setup
        wanted = Setup(
            algorithm if isinstance(algorithm, Algorithm) else named.algorithm,
            local or (built.task.local if isinstance(algorithm, Algorithm) else named.local),
            weighting or ("uniform" if isinstance(algorithm, Algorithm) else named.weighting),
        ).options()
        before = named.options()
        given = {**{k: v for k, v in wanted.items() if before.get(k) != v}, **given}
    return _with_options(bare, given)


def _whole(value: Any, name: str) -> Any:
    """Return a whole number of numpy as one of Python, and anything else as it is."""
    if value is not None:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        require(whole, f"{name} must be a whole number: {value!r}")
    return None if value is None else int(value)


def _cohort(cohort: Any) -> int | float | tuple[int, ...] | str | None:
    """Return a cohort as a spec has it: a function by its reference."""
    if cohort is None or isinstance(cohort, str):
        return cohort
    if callable(cohort):
        return reference_to(cohort, getattr(cohort, "__name__", "choose"))
    if isinstance(cohort, Integral):
        require(int(cohort) >= 1, f"the cohort must be at least 1, not {cohort}")
        return int(cohort)
    if isinstance(cohort, Real):
        return float(cohort)
    try:
        return tuple(map(index, cohort))
    except TypeError:
        raise UsageError(
            f"the cohort must be a list of client numbers, not {shown(repr(cohort), 40)}"
        ) from None


def _with_options(spec: Spec, options: Mapping[str, Any]) -> Spec:
    texts = {name: option_text(value) for name, value in options.items()}
    return replace(spec, options=tuple({**dict(spec.options), **texts}.items()))


def _of_task(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("task.")}


def _is_registered(algorithm: Algorithm) -> bool:
    """Return whether an algorithm is one of the package, perhaps with other values."""
    if algorithm.name not in ALGORITHMS:
        return False
    own = build_algorithm(algorithm.name)
    return type(own.client) is type(algorithm.client) and type(own.server) is type(algorithm.server)


def _named_algorithm(algorithm: Algorithm | str) -> tuple[str, str | None]:
    """Return the name of an algorithm, and its reference if it is the user's own."""
    if isinstance(algorithm, str):
        return split_algorithm(algorithm)
    require(
        isinstance(algorithm, Algorithm),
        f"the algorithm is {shown(algorithm, 40)}, not an Algorithm; call it, e.g. "
        'fedexp.fedavg(), or give its name, e.g. "fedavg"',
    )
    source = None if _is_registered(algorithm) else reference_to(algorithm, algorithm.name)
    return algorithm.name, source
