"""Which engine runs a task: the one asked for, or the one that suits the model and the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors
from fedexp.engine import loop
from fedexp.engine.state import SimulationState
from fedexp.engine.vectorized import Vectorized
from fedexp.engine.work import Work
from fedexp.errors import EngineWarning, UsageError

EngineName = Literal["auto", "loop", "vectorized"]
Engine = Callable[[Work, SimulationState], tuple[Aggregate, dict[int, Tensors]]]


def choose_engine(name: EngineName, work: Work, state: SimulationState) -> Engine:
    """The engine to use.

    "auto" batches wherever that was measured to pay: always on a GPU; on a CPU if the objective
    says so. It does not time anything, so that the same run takes the same engine every time and
    gives the same bits. A model that cannot be batched runs in the loop, and a warning says why.
    """
    pays = getattr(work.task.objective, "batching_pays", None)
    if name == "loop" or (name == "auto" and (pays is None or not pays(state.params.device))):
        return loop.run_cohort
    try:
        Vectorized(graphs=False)(_trial(work), state)
    except Exception as error:  # torch.func refuses models with errors of many types
        return _cannot(name, error)
    return Vectorized()


def _trial(work: Work) -> Work:
    """Two clients and one step of the round: enough to see whether it runs."""
    local = replace(work.local, steps=1, epochs=None)
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
