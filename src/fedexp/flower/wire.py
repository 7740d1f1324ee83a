"""A task's model as it travels, and back.

In an engine a model is one vector with convolutions' channels last (`fedexp.objective.flat`); on
the wire it is named arrays, as a `state_dict` has them. A problem without a module is one array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import Tensors
from fedexp.errors import UsageError, require
from fedexp.flower.layout import Layout, ndarrays
from fedexp.objective import Buffers, ModuleObjective
from fedexp.objective.flat import flatten
from fedexp.tasks.task import Task

ALONE = "params"


def to_arrays(task: Task, params: Tensor, buffers: Buffers) -> ArrayRecord:
    """The arrays of a task's model."""
    objective = task.objective
    if not isinstance(objective, ModuleObjective):
        return ArrayRecord({ALONE: params.detach()})
    named = objective.load(params, buffers).state_dict()
    lost = sorted(set(objective.buffer_names) - named.keys())
    require(
        not lost,
        f"the model's state_dict leaves out {', '.join(lost)}, so a server would never see it; "
        "register such buffers with persistent=True",
    )
    return ArrayRecord(dict(named))


def from_arrays(task: Task, arrays: ArrayRecord) -> tuple[Tensor, Buffers]:
    """A task's model out of its arrays, on the device of the task."""
    objective, named = task.objective, _tensors(arrays)
    device = next(iter(task.train.fields.values())).device
    try:
        if not isinstance(objective, ModuleObjective):
            return named[ALONE].to(device), Buffers.none()
        buffers = [named[name] for name in objective.buffer_names]
        params = flatten([named[name] for name in objective.names])
    except KeyError as error:
        raise UsageError(
            f"the server's model has no {error.args[0]!r}, which that of task {task.name} has; "
            "start the server with initial_arrays of the same task"
        ) from None
    floating = len(objective.averaged)
    averaged, kept = flatten(buffers[:floating]), flatten([b.long() for b in buffers[floating:]])
    return params.to(device), Buffers(averaged.to(device), kept.long().to(device))


class Places:
    """Where a task's parameters lie in the flat vectors of the wire."""

    def __init__(self, task: Task, layout: Layout) -> None:
        self.dim = layout.dim
        index = _indices(layout)
        objective = task.objective
        names = objective.names if isinstance(objective, ModuleObjective) else [ALONE]
        require(
            all(name in index for name in names),
            "the server averages arrays that are parameters of the model; leave them out of the "
            "strategy's buffers",
        )
        self.places = flatten([index[name] for name in names])

    def gather(self, vectors: Tensors, device: torch.device) -> dict[str, Tensor]:
        """Vectors of the wire, in the task's order."""
        return {name: value[self.places].to(device) for name, value in vectors.items()}

    def scatter(self, vectors: Tensors) -> dict[str, Tensor]:
        """Vectors of the task, in the wire's order; what the task does not train is zero."""
        out = {}
        for name, value in vectors.items():
            out[name] = torch.zeros(self.dim, dtype=value.dtype)
            out[name][self.places] = value.cpu()
        return out


def _indices(layout: Layout) -> Mapping[str, Tensor]:
    """For every parameter, the place of each of its numbers, in its shape."""
    index, at = dict[str, Tensor](), 0
    for slot in layout.slots:
        if slot.kind == "parameter":
            index[slot.name] = torch.arange(at, at + slot.size).view(slot.shape)
            at += slot.size
    return index | {name: index[source] for name, source in layout.tied.items()}


def _tensors(arrays: ArrayRecord | Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in ndarrays(arrays).items()}
