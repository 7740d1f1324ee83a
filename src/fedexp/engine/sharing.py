"""What several processes that share a run have to offer: an engine, and an evaluation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedexp.engine.loop import Engine, Run
from fedexp.engine.work import Work
from fedexp.objective import Buffers
from fedexp.tasks.task import Task


class Sharing(Protocol):
    """How a round's work is shared out. Every process ends it with the same numbers.

    Attributes:
        beside: how many of the processes are on this machine.
    """

    @property
    def beside(self) -> int: ...

    def mine(self, work: Work) -> Work:
        """The part of a round that falls to this process."""
        ...

    def engine(self, engine: Engine) -> Run:
        """One that trains this process's part of a cohort, and returns the sums of all parts."""
        ...

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        """What `task.evaluate` gives, computed by all processes together."""
        ...


class Alone:
    """The sharing of a process that does everything itself."""

    beside = 1

    def mine(self, work: Work) -> Work:
        return work

    def engine(self, engine: Engine) -> Run:
        return engine

    def evaluate(self, task: Task, params: Tensor, buffers: Buffers) -> dict[str, float]:
        return task.evaluate(params, buffers)
