"""Which engine runs a task: the one asked for, or the one that suits the model and the device.

An engine other than the loop is used only after it agreed with the loop on the user's own model
(`trial.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch

from fedexp.engine.batched import COHORT_BYTES, Batched, Implementation
from fedexp.engine.dense import Dense, dense_network_of
from fedexp.engine.loop import Engine, Loop
from fedexp.engine.plan import Work
from fedexp.engine.quadratic import Quadratic, suits_quadratic
from fedexp.engine.state import SimulationState
from fedexp.engine.threads import Threads, check_draws, threads_pay
from fedexp.engine.trial import Trials
from fedexp.errors import EngineWarning, UsageError, require
from fedexp.objective import BatchedObjective, ModuleObjective
from fedexp.precision import Precision

EngineName = Literal["auto", "loop", "threads", "batched", "dense", "quadratic"]
ENGINES: tuple[str, ...] = get_args(EngineName)
MOST_PADDING = 4  # computing this many times too much eats what batching gains


@dataclass(frozen=True)
class Candidate:
    """An engine that may run the work.

    Attributes:
        make: returns it for a round's work.
        tried: returns it for the trial, without what takes long to prepare.
        layers: whether it replaces the model's layers by stacked ones.
        plain: what shows in plain arithmetic, without kernels of its own, that examples may be
            batched as it does; None for itself.
    """

    make: Callable[[Work], Engine]
    tried: Callable[[Work], Engine] | None = None
    layers: bool = False
    plain: Callable[[Work], Engine] | None = None


def check_engine_name(name: str) -> EngineName:
    """Return the name of an engine; an old one with a warning."""
    if name == "vectorized":
        message = "engine 'vectorized' is called 'auto' now; 'batched' names one engine exactly"
        warnings.warn(message, FutureWarning, stacklevel=3)
        return "auto"
    require(name in ENGINES, f"engine is one of {', '.join(ENGINES)}, not {name!r}")
    return name  # type: ignore[return-value]


def select_engine(
    name: EngineName, work: Work, state: SimulationState, precision: Precision = "float32"
) -> Engine:
    """Return the engine to use.

    "auto" solves quadratic problems in closed form, has an engine of its own for plain dense
    networks on a CPU, batches other models wherever that was measured to pay (on a GPU always),
    unless clients are so unequal that most of the work would be padding, and gives large models on
    a CPU a thread per client. It times nothing, so that the same run takes the same engine every
    time and gives the same bits. Where an engine disagrees with the loop or cannot run the model,
    the next one is tried, and a warning says why; the loop is the last.

    Args:
        name: "auto", or the engine that must run; `UsageError` where it cannot.
        work: the first round.
        state: the state before it.
        precision: of the run.
    """
    if name == "loop":
        return Loop()
    reason, mistake = "this engine does not suit the model, the rule or the device", False
    candidates, trials = _candidates(name, work, state), Trials(work, state, precision)
    for candidate in candidates:
        try:
            trials.check(candidate.tried or candidate.make, candidate.layers, candidate.plain)
            if candidate.make is _threads:
                check_draws(cast(ModuleObjective, work.task.objective), state, trials.batch())
            return candidate.make(work)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch.func refuses models with errors of many types
            reason, mistake = _first_line(error), isinstance(error, UsageError)
    if mistake and name != "auto":
        raise UsageError(reason)
    if name != "auto":
        raise UsageError(f"engine {name!r} cannot be used: {reason}; use engine='loop'")
    if candidates and not mistake:  # of the user's: the loop meets it too
        warnings.warn(f"clients run one after another: {reason}", EngineWarning, stacklevel=4)
    return Loop()


def _candidates(name: EngineName, work: Work, state: SimulationState) -> list[Candidate]:
    """Return what may run the work, the best first; "auto" asks for what pays as well."""
    auto, found = name == "auto", []
    if name in ("auto", "quadratic") and suits_quadratic(work, state):
        found.append(Candidate(lambda _: Quadratic()))
    if name in ("auto", "dense") and (dense := dense_network_of(work, state)) is not None:
        found.append(Candidate(lambda _: Dense(dense)))
    objective = work.task.objective
    if isinstance(objective, BatchedObjective) and (
        name == "batched" or (auto and not found and _batching_pays(objective, work, state))
    ):
        found += _batched(objective, work)
    if isinstance(objective, ModuleObjective) and (
        name == "threads" or (auto and threads_pay(work, state))
    ):
        found.append(Candidate(_threads))
    return found


def _batched(objective: BatchedObjective, work: Work) -> list[Candidate]:
    """Return the implementations of the batched engine, the fastest first."""
    forms: list[tuple[Implementation, bool]] = [("vmap", True), ("vmap", False)]
    if isinstance(objective, ModuleObjective):
        if objective.mixes_examples:
            forms = [("vmap", False)]
        elif objective.has_layers and work.algorithm.client.is_linear:
            forms = [("layers", True), *forms]
    return [_batched_candidate(*form) for form in forms]


def _batched_candidate(implementation: Implementation, padded: bool) -> Candidate:
    def make(work: Work) -> Engine:
        objective = work.task.objective
        if implementation == "layers" and isinstance(objective, ModuleObjective):
            objective.evaluates_layers = objective.device.type == "cuda"
        return Batched(implementation, padded)

    layers = implementation == "layers"
    return Candidate(
        make,
        lambda _: Batched(implementation, padded, graphs=False, fuse=False),
        layers,
        (lambda _: Batched("vmap", graphs=False, fuse=False)) if layers else None,
    )


def _threads(work: Work) -> Engine:
    assert isinstance(work.task.objective, ModuleObjective)
    return Threads(work.task.objective)


def _batching_pays(objective: BatchedObjective, work: Work, state: SimulationState) -> bool:
    """Return whether the objective gains by batching, and clients are alike enough to be padded."""
    if not objective.batching_pays(state.params.device):
        return False
    if 2 * state.params.nbytes > COHORT_BYTES.get(state.params.device.type, 0):
        return False  # one at a time is no batch
    sizes = work.task.train.sizes[work.cohort]
    widths = np.minimum(sizes, work.local.batch_size or sizes.max())
    steps = np.array([work.local.steps_for(int(size)) for size in sizes])
    padded = len(sizes) * widths.max() * steps.max()
    return bool(padded <= MOST_PADDING * (widths * steps).sum())


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
