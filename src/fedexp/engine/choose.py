"""Which engine runs a task: the one asked for, or the one that suits the model and the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors
from fedexp.engine import loop
from fedexp.engine.linear import Linear, steps_are_linear
from fedexp.engine.state import SimulationState
from fedexp.engine.vectorized import Vectorized
from fedexp.engine.work import Work
from fedexp.errors import EngineWarning, UsageError

EngineName = Literal["auto", "loop", "vectorized"]
Engine = Callable[[Work, SimulationState], tuple[Aggregate, dict[int, Tensors]]]

MOST_PADDING = 4  # computing this many times too much eats what batching gains


def choose_engine(name: EngineName, work: Work, state: SimulationState) -> Engine:
    """The engine to use.

    Steps that are a linear iteration are taken in one go, unless the loop is asked for. "auto"
    batches wherever that was measured to pay, on a GPU always and on a CPU if the objective says
    so, unless clients are so unequal that most of the work would be padding. It does not time
    anything, so that the same run takes the same engine every time and gives the same bits. A model
    that cannot be batched runs in the loop, and a warning says why.
    """
    if name != "loop" and steps_are_linear(work, state):
        return Linear()
    if name == "loop" or (name == "auto" and not _pays(work, state)):
        return loop.run_cohort
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
    sizes = work.task.train.sizes[work.cohort]
    widths = np.minimum(sizes, work.local.batch_size or sizes.max())
    steps = np.array([work.local.steps_for(int(size)) for size in sizes])
    padded = len(sizes) * widths.max() * steps.max()
    return bool(padded <= MOST_PADDING * (widths * steps).sum())


def _detect_mixing(work: Work, state: SimulationState) -> None:
    """Ask the objective to look, on two examples of the cohort's largest client."""
    detect = getattr(work.task.objective, "detect_mixing", None)
    largest = int(work.cohort[work.task.train.sizes[work.cohort].argmax()])
    if detect is None or work.task.train.sizes[largest] < 2:
        return
    batch = {name: value[:2] for name, value in work.task.train.client(largest).items()}
    transform = work.task.transform
    detect(state.params, state.buffers, batch if transform is None else transform.evaluate(batch))


def _trial(work: Work) -> Work:
    """Two clients and one small step of the round: enough to see whether it runs."""
    few = work.local.batch_size and min(2, work.local.batch_size)
    local = replace(work.local, steps=1, epochs=None, batch_size=few)
    return replace(work, local=local, cohort=work.cohort[:2])


def _cannot(name: EngineName, error: Exception) -> Engine:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if name == "vectorized":
        raise UsageError(f"this model cannot be batched ({reason}); use engine='loop'") from error
    warnings.warn(
        f"clients run one after another, because the model cannot be batched: {reason}",
        EngineWarning,
        stacklevel=4,
    )
    return loop.run_cohort
