"""Objectives: what a client minimises."""

from fedexp.objective.base import (
    BatchedObjective,
    Buffers,
    Objective,
    buffer_changes,
    changed_buffers,
)
from fedexp.objective.least_squares import LeastSquares
from fedexp.objective.module import ModuleObjective

__all__ = [
    "BatchedObjective",
    "Buffers",
    "LeastSquares",
    "ModuleObjective",
    "Objective",
    "buffer_changes",
    "changed_buffers",
]
