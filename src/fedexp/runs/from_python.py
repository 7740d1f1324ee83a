"""Specs from Python objects: what `fedexp.run`, `compare` and `tune` are given becomes a `Spec`.

Objects that a name describes (an algorithm of the package with other values) become names and
options, others a reference to where they are defined, so that a run can be resumed from its folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from torch import Tensor, nn

from fedexp.algorithms import ALGORITHMS, Algorithm
from fedexp.cohorts import Cohort
from fedexp.engine import EngineName, Record
from fedexp.engine.select import check_engine_name
from fedexp.errors import require, shown, unknown_name, whole_number
from fedexp.local import LocalTraining
from fedexp.options import (
    Setup,
    build_algorithm,
    option_text,
    share_options,
    split_algorithm,
    split_task,
    split_task_options,
)
from fedexp.precision import Precision
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy
from fedexp.references import reference_to
from fedexp.runs.spec import EPS, Run, Spec, plain_cohort
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
        mode: "paper" for the values tuned for the task, "authors-code" or "recommended".
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
    of_task, others = split_task_options(settings.get("options") or {})
    for_task = {f"task.{k}": v for k, v in of_task.items()}
    common: Settings = {**settings, "options": for_task}
    bare: dict[str, Run] = {}
    for algorithm in algorithms:
        built = next(iter(bare.values())).task if bare else None
        run = prepared_run(task, algorithm, seed, common, runs, built)
        name = run.spec.algorithm
        require(
            name not in bare,
            f"two algorithms are called {name!r}; give one another name, e.g. "
            'dataclasses.replace(algorithm, name="...")',
        )
        bare[name] = run
    shared = share_options({name: run.setup for name, run in bare.items()}, others)
    found = []
    for algorithm, (name, run) in zip(algorithms, bare.items(), strict=True):
        own: Settings = {**settings, "options": {**for_task, **shared[name]}}
        found.append(prepared_run(task, algorithm, seed, own, runs, run.task))
    return found


def prepared_run(
    task: Task | str,
    algorithm: Algorithm | str,
    seed: int,
    settings: Settings,
    runs: PathLike | None = None,
    built: Task | None = None,
) -> Run:
    """Return the run of these objects.

    Args:
        task: a task, its name or a reference.
        algorithm: an algorithm, its name or a reference.
        seed: of the run.
        settings: see `Settings`.
        runs: folder of all runs, beside which weights to start from are stored.
        built: the task, where another run has built it from its name and the same options.
    """
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
    start, rounds = settings.get("start"), settings.get("rounds")
    every = settings.get("evaluate_every")
    bare = Spec(
        task=task_name,
        algorithm=name,
        seed=whole_number("seed", seed, 0),
        rounds=None if rounds is None else whole_number("rounds", rounds, 1),
        cohort=_cohort(settings.get("cohort")),
        mode=settings.get("mode") or "paper",
        evaluate_every=None if every is None else whole_number("evaluate_every", every, 1),
        engine=check_engine_name(settings.get("engine") or "auto"),
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
    given, typed = dict(settings.get("options") or {}), set[str]()
    if isinstance(algorithm, Algorithm) or local is not None or weighting is not None:
        run = _with_options(bare, _of_task(given)).prepare(built)
        named, built = run.setup, run.task
        wanted = Setup(
            algorithm if isinstance(algorithm, Algorithm) else named.algorithm,
            local or (built.local if isinstance(algorithm, Algorithm) else named.local),
            weighting or ("uniform" if isinstance(algorithm, Algorithm) else named.weighting),
        )
        if isinstance(algorithm, Algorithm):  # options change what was given, not the task's values
            others = {k: option_text(v) for k, v in given.items() if not k.startswith("task.")}
            wanted, given = wanted.with_options(others), _of_task(given)
            typed = {wanted.full_name(key) for key in others}
        before, after = named.options(), wanted.options()
        changed = typed | {k for k, v in after.items() if before.get(k) != v}
        if changed & set(EPS):
            changed |= set(EPS) & after.keys()  # a number goes with its unit
        given = {**{k: v for k, v in after.items() if k in changed}, **given}
    return _with_options(bare, given).prepare(built)


def _cohort(cohort: Any) -> int | float | tuple[int, ...] | str | None:
    """Return a cohort as a spec has it: a function by its reference."""
    if callable(cohort):
        return reference_to(cohort, getattr(cohort, "__name__", "choose"))
    found: int | float | tuple[int, ...] | str | None = plain_cohort(cohort)
    require(
        not isinstance(found, int) or found >= 1, f"the cohort must be at least 1, not {cohort}"
    )
    return found


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
