"""Objectives: what a client minimises."""

from fedexp.objective.base import (
    BatchedObjective,
    Buffers,
    CopyableObjective,
    DenseObjective,
    DeviceObjective,
    LoadableObjective,
    Objective,
    QuadraticObjective,
    StackedObjective,
    StartableObjective,
    buffer_changes,
    changed_buffers,
)
from fedexp.objective.least_squares import LeastSquares
from fedexp.objective.module import ModuleObjective

__all__ = [
    "BatchedObjective",
    "Buffers",
    "CopyableObjective",
    "DenseObjective",
    "DeviceObjective",
    "LeastSquares",
    "LoadableObjective",
    "ModuleObjective",
    "Objective",
    "QuadraticObjective",
    "StackedObjective",
    "StartableObjective",
    "buffer_changes",
    "changed_buffers",
]
