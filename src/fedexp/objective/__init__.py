"""Objectives: what a client minimises."""

from fedexp.objective.base import (
    BatchedObjective,
    Buffers,
    ComparableObjective,
    Constants,
    CopyableObjective,
    CountingObjective,
    DenseObjective,
    DeviceObjective,
    Fields,
    LoadableObjective,
    Objective,
    PredictingObjective,
    QuadraticObjective,
    StackedObjective,
    StartableObjective,
    buffer_changes,
    changed_buffers,
    map_tensors,
)
from fedexp.objective.least_squares import LeastSquares
from fedexp.objective.module import ModuleObjective

__all__ = [
    "BatchedObjective",
    "Buffers",
    "ComparableObjective",
    "Constants",
    "CopyableObjective",
    "CountingObjective",
    "DenseObjective",
    "DeviceObjective",
    "Fields",
    "LeastSquares",
    "LoadableObjective",
    "ModuleObjective",
    "Objective",
    "PredictingObjective",
    "QuadraticObjective",
    "StackedObjective",
    "StartableObjective",
    "buffer_changes",
    "changed_buffers",
    "map_tensors",
]
