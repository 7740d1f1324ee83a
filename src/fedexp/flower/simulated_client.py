"""A task's model as it travels, and back.

In an engine a model is one vector with convolutions' channels last (`fedexp.objective.base`); on
the wire it is named arrays, as a `state_dict` has them. A problem without a module is one array.

Clients of a fedexp task on Flower, which train exactly as the simulator's do.

Batches, augmentation, dropout and learning rates follow from (seed, round, client), so the same
federation gives the same rounds in `fedexp.simulate`, in Flower's simulation and on real nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.engine.loop import Trained, train_client
from fedexp.engine.plan import Work
from fedexp.errors import UsageError, require
from fedexp.flower.client_state import partition_of
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.request import Request, single_record
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, ModuleObjective, changed_buffers
from fedexp.objective.base import flatten
from fedexp.precision import arithmetic, default_precision
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


Handler = Callable[[Message, Context], Message]


def initial_arrays(task: Task, seed: int = 0) -> ArrayRecord:
    """The first model of a task: what `simulate` with that seed begins from."""
    return to_arrays(task, *task.objective.initial(seed))


def planned(task: Task, local: LocalTraining | None = None, seed: int = 0) -> Handler:
    """A train function for a ClientApp: `app.train()(planned(task, seed=0))`.

    The node's `partition-id` says which client of the task it is.

    Args:
        task: the problem and its data.
        local: local training; the task's own when None.
        seed: as `simulate` takes it.
    """

    def train(message: Message, context: Context) -> Message:
        client = partition_of(context, task.train.clients)
        objective = task.objective
        module = objective.module if isinstance(objective, ModuleObjective) else None
        request = Request.of(message, context, module)
        require(request.round >= 1, "the server did not say which round it is")
        work = Work(
            task,
            Algorithm("planned", client=request.rule),
            local or task.local,
            "uniform",
            seed,
            request.round,
            np.array([client]),
        )
        return _trained_reply(work, request, client)

    return train


def _trained_reply(work: Work, request: Request, client: int) -> Message:
    task = work.task
    params, buffers = from_arrays(task, request.arrays)
    places = Places(task, request.layout)
    state = replace(
        SimulationState.of(params, buffers, work.algorithm),
        broadcast=places.gather(request.broadcast, params.device),
        clients={client: places.gather(request.client_state, params.device)},
    )
    with arithmetic(default_precision(params.device)):
        trained = train_client(work, state, client)
    size = int(task.train.sizes[client])
    extras = {name: value for name, value in trained.extras.items() if name != "buffers"}
    return request.reply(
        _model_after(task, state, trained),
        {"num-examples": size},
        places.scatter(trained.state),
        places.scatter(extras),
    )


def _model_after(task: Task, state: SimulationState, trained: Trained) -> ArrayRecord:
    averaged = state.buffers.averaged
    if "buffers" in trained.extras:
        averaged = changed_buffers(averaged, trained.extras["buffers"])
    return to_arrays(task, state.params - trained.delta, Buffers(averaged, state.buffers.kept))


def planned_evaluate(task: Task) -> Handler:
    """An evaluate function for a ClientApp: the mean loss (and accuracy) on the client's data."""

    def evaluate(message: Message, context: Context) -> Message:
        client = partition_of(context, task.train.clients)
        batch = task.train.client(client)
        if task.transform is not None:
            batch = dict(task.transform.evaluate(batch))
        _, arrays = single_record(message.content, ArrayRecord, "model")
        values = task.objective.measure(*from_arrays(task, arrays), batch)
        metrics = {name: float(value.mean()) for name, value in values.items()}
        told = MetricRecord({"num-examples": int(task.train.sizes[client]), **metrics})
        return Message(RecordDict({"metrics": told}), reply_to=message)

    return evaluate


def central_evaluation(task: Task) -> Callable[[int, ArrayRecord], MetricRecord]:
    """An `evaluate_fn` for `strategy.start`: the task's losses and accuracies at the server."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(task.evaluate(*from_arrays(task, arrays))))

    return evaluate
