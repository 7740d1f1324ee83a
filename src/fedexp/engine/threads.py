"""The loop with its clients shared out among threads: what suits large models on a CPU.

Each client is trained as in the loop, by one thread, so its numbers do not depend on how many there
are. Threads that share one operation wait for each other many times in a step; these do not, and
each client's model stays in a core's cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from fedexp.engine.loop import Sums, Trained, sum_in_parts, sum_trained, train
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.objective import ModuleObjective
from fedexp.objective.dropout import OwnDropout, with_own_dropout
from fedexp.seeding import torch_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL_MODEL = 100_000  # parameters; below, python itself is what takes the time


def threads_pay(work: Work, state: SimulationState) -> bool:
    """Whether clients gain by threads of their own: a large model, a CPU with several cores."""
    return (
        isinstance(work.task.objective, ModuleObjective)
        and state.params.device.type == "cpu"
        and state.params.numel() >= SMALL_MODEL
        and torch.get_num_threads() > 1
        and len(work.cohort) > 1
    )


class Private:
    """A copy of an objective for one thread at a time, whose dropout no other thread disturbs."""

    def __init__(self, objective: ModuleObjective) -> None:
        self.objective = objective.on(objective.device, "float32")
        self.dropouts = with_own_dropout(self.objective.module)

    def seed(self, derived: int) -> None:
        for k, layer in enumerate(self.dropouts):
            layer.generator.manual_seed(derived + k)
