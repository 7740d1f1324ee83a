"""Clients that train a fedexp task on Flower exactly as the simulator does.

Batches, augmentation, dropout and learning rates are functions of (seed, round, client), so the
same federation gives the same rounds in `fedexp.simulate`, in Flower's simulation and on real
nodes. In an engine a model is one vector with convolutions' channels last
(`fedexp.objective.base`); in a record it is named arrays, as in a `state_dict`. A problem without a
module is one array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.engine.loop import train as train_client
from fedexp.engine.plan import Work
from fedexp.errors import UsageError, require
from fedexp.flower.client_state import partition_of
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.request import TrainRequest
from fedexp.flower.transport import only_record
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, ModuleObjective, changed_buffers
from fedexp.objective.base import flatten
from fedexp.precision import arithmetic, default_precision
from fedexp.seeding import seeded_torch
from fedexp.tasks.task import Task

TrainFn = Callable[[Message, Context], Message]
PARAMS = "params"  # the one array of a problem without a module


def simulated_train(task: Task, local: LocalTraining | None = None, seed: int = 0) -> TrainFn:
    """Return a train function for a ClientApp: `app.train()(simulated_train(task, seed=0))`.

    The node's `partition-id` decides which client of the task it is.

    Args:
        task: the problem and its data.
        local: local training; the task's own when None.
        seed: as in `simulate`.
    """

    local = local or task.local
    require(
        not local.keep_state,
        "local.keep_state needs the simulator: on Flower a node keeps its client rule's state only",
    )

    def train(message: Message, context: Context) -> Message:
        client = partition_of(context, task.train.clients)
        objective = task.objective
        module = objective.module if isinstance(objective, ModuleObjective) else None
        request = TrainRequest.of(message, context, module)
        require(request.round >= 1, "the message has no round number; let the server send it")
        algorithm = Algorithm("simulated", client=request.rule)
        cohort = np.array([client])
        work = Work(task, algorithm, local, "uniform", seed, request.round, cohort)
        params, buffers = from_arrays(task, request.arrays)
        order = ParamOrder(task, request.layout)
        state = replace(
            SimulationState.of(params, buffers, algorithm),
            broadcast=order.gather(request.broadcast, params.device),
            clients={client: order.gather(request.client_state, params.device)},
        )
        arithmetic_of_device = arithmetic(default_precision(params.device))
        with arithmetic_of_device, seeded_torch(seed, "layers", request.round, client):
            trained = train_client(work, state, client, objective)
        extras = dict(trained.extras)
        averaged = buffers.averaged
        if "buffers" in extras:
            averaged = changed_buffers(averaged, extras.pop("buffers"))
        return request.reply(
            to_arrays(task, params - trained.delta, Buffers(averaged, buffers.kept)),
            {"num-examples": int(task.train.sizes[client])},
            order.scatter(trained.state),
            order.scatter(extras),
        )

    return train


def simulated_evaluate(task: Task) -> TrainFn:
    """Return an evaluate function for a ClientApp: mean loss and accuracy on the client's data."""

    def evaluate(message: Message, context: Context) -> Message:
        client = partition_of(context, task.train.clients)
        batch = task.train.client(client)
        parts = {name: float(part.sum()) for name, part in task.parts(batch).items()}
        if task.transform is not None:
            batch = dict(task.transform.evaluate(batch))
        _, arrays = only_record(message.content.array_records, "model")
        values = task.objective.measure(*from_arrays(task, arrays), batch)
        metrics = {
            name: float(value.cpu().double().sum()) / parts.get(name, len(value))
            for name, value in values.items()
        }
        record = MetricRecord({"num-examples": int(task.train.sizes[client]), **metrics})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return evaluate


def initial_arrays(task: Task, seed: int = 0) -> ArrayRecord:
    """Return the initial model of a task: that of `simulate` with this seed."""
    return to_arrays(task, *task.objective.initial(seed))


def central_evaluation(task: Task) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return an `evaluate_fn` for `strategy.start`: the task's losses and accuracies."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(task.evaluate(*from_arrays(task, arrays))))

    return evaluate


def to_arrays(task: Task, params: Tensor, buffers: Buffers) -> ArrayRecord:
    """Return a task's model as a record."""
    objective = task.objective
    if not isinstance(objective, ModuleObjective):
        return ArrayRecord({PARAMS: params.detach()})
    named = objective.load(params, buffers).state_dict()
    lost = sorted(set(objective.buffer_names) - named.keys())
    require(
        not lost,
        f"the model's state_dict leaves out {', '.join(lost)}, so a server would never see it; "
        "register such buffers with persistent=True",
    )
    return ArrayRecord(dict(named))


def from_arrays(task: Task, arrays: ArrayRecord) -> tuple[Tensor, Buffers]:
    """Return a task's model from its record, on the device of the task."""
    objective = task.objective
    named = {name: torch.from_numpy(value) for name, value in ndarrays(arrays).items()}
    device = next(iter(task.train.fields.values())).device
    try:
        if not isinstance(objective, ModuleObjective):
            return named[PARAMS].to(device), Buffers.none()
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


class ParamOrder:
    """The order of a task's parameters within the flat vectors of a record's layout."""

    def __init__(self, task: Task, layout: Layout) -> None:
        self.dim = layout.dim
        offsets = layout.offsets()
        index = {
            slot.name: torch.arange(slot.size).view(slot.shape) + offsets[slot.source or slot.name]
            for slot in layout.slots
            if slot.kind in ("parameter", "tied")
        }
        objective = task.objective
        names = objective.names if isinstance(objective, ModuleObjective) else [PARAMS]
        require(
            all(name in index for name in names),
            "the server averages arrays that are parameters of the model; leave them out of the "
            "strategy's buffers",
        )
        self.index = flatten([index[name] for name in names])

    def gather(self, vectors: Tensors, device: torch.device) -> dict[str, Tensor]:
        """Return vectors of the layout in the task's order."""
        return {name: value[self.index].to(device) for name, value in vectors.items()}

    def scatter(self, vectors: Tensors) -> dict[str, Tensor]:
        """Return vectors of the task in the layout's order; zero for what it does not train."""
        out = {}
        for name, value in vectors.items():
            out[name] = torch.zeros(self.dim, dtype=value.dtype)
            out[name][self.index] = value.cpu()
        return out
