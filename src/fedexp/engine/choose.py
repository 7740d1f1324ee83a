"""Which engine runs a task: the one asked for, or the one that suits the model and the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors
from fedexp.data.federation import Batch
from fedexp.engine import loop
from fedexp.engine.dense import dense_engine
from fedexp.engine.linear import Linear, steps_are_linear
from fedexp.engine.state import SimulationState
from fedexp.engine.threads import Threads, threads_pay
from fedexp.engine.vectorized import COHORT_BYTES, Vectorized
from fedexp.engine.work import Work
from fedexp.errors import EngineWarning, UsageError
from fedexp.objective import ModuleObjective

EngineName = Literal["auto", "loop", "vectorized"]
Engine = Callable[[Work, SimulationState], tuple[Aggregate, dict[int, Tensors]]]

MOST_PADDING = 4  # computing this many times too much eats what batching gains


def choose_engine(name: EngineName, work: Work, state: SimulationState) -> Engine:
    """The engine to use.

    Steps that are a linear iteration are taken in one go, and plain dense networks have an engine
    of their own on a CPU, unless the loop is asked for. "auto" batches other models wherever that
    was measured to pay, on a GPU always and on a CPU if the objective says so, unless clients are
    so unequal that most of the work would be padding. Large models for which it does not pay get a
    thread for each client. It does not time anything, so that the same run takes the same engine
    every time and gives the same bits. A model that cannot be batched runs in the loop, and a
    warning says why.
    """
    if name == "loop":
        return loop.run_cohort
    if steps_are_linear(work, state):
        return Linear()
    dense = dense_engine(work, state)
    if dense is not None:
        return dense
    if not _pays(work, state):
        threads = _threads(work, state)
        if threads is not None or name == "auto":
            return threads or loop.run_cohort
    try:
        _detect_mixing(work, state)
        Vectorized(graphs=False, fuse=False)(_trial(work), state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch.func refuses models with errors of many types
        return _cannot(name, error)
    return Vectorized()


def _pays(work: Work, state: SimulationState) -> bool:
    """Whether the objective gains by batching here, and clients are alike enough to be padded."""
    pays = getattr(work.task.objective, "batching_pays", None)
    if pays is None or not pays(state.params.device):
        return False
    if 2 * state.params.nbytes > COHORT_BYTES.get(state.params.device.type, 0):
        return False  # one at a time is no batch
    sizes = work.task.train.sizes[work.cohort]
    widths = np.minimum(sizes, work.local.batch_size or sizes.max())
    steps = np.array([work.local.steps_for(int(size)) for size in sizes])
    padded = len(sizes) * widths.max() * steps.max()
    return bool(padded <= MOST_PADDING * (widths * steps).sum())


def _threads(work: Work, state: SimulationState) -> Engine | None:
    """Threads for the clients, where they pay and cannot disturb each other."""
    if not threads_pay(work, state):
        return None
    try:
        engine = Threads(cast(ModuleObjective, work.task.objective))
        return engine if engine.keeps_apart(state, _two_examples(work)) else None
    except Exception as error:  # layers of the copies do not suit the model, or nothing does
        _warn("clients get no threads, because copies of the model cannot be trained", error)
        return None


def _detect_mixing(work: Work, state: SimulationState) -> None:
    """Ask the objective to look, on two examples of the cohort's largest client."""
    detect, batch = getattr(work.task.objective, "detect_mixing", None), _two_examples(work)
    if detect is not None and len(next(iter(batch.values()))) == 2:
        detect(state.params, state.buffers, batch)


def _two_examples(work: Work) -> Batch:
    """Of the cohort's largest client, as the model sees them; one where it has no more."""
    largest = int(work.cohort[work.task.train.sizes[work.cohort].argmax()])
    batch = {name: value[:2] for name, value in work.task.train.client(largest).items()}
    transform = work.task.transform
    return batch if transform is None else transform.evaluate(batch)


def _trial(work: Work) -> Work:
    """Two clients and one small step of the round: enough to see whether it runs."""
    few = work.local.batch_size and min(2, work.local.batch_size)
    local = replace(work.local, steps=1, epochs=None, batch_size=few)
    return replace(work, local=local, cohort=work.cohort[:2])


def _cannot(name: EngineName, error: Exception) -> Engine:
    if name == "vectorized":
        reason = _first_line(error)
        raise UsageError(f"this model cannot be batched ({reason}); use engine='loop'") from error
    _warn("clients run one after another, because the model cannot be batched", error)
    return loop.run_cohort


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {_first_line(error)}", EngineWarning, stacklevel=5)


def _first_line(error: Exception) -> str:
    told = str(error).strip()
    return told.splitlines()[0] if told else type(error).__name__
