"""Clients of a fedexp task on Flower, which train exactly as the simulator's do.

Batches, augmentation, dropout and learning rates follow from (seed, round, client), so the same
federation gives the same rounds in `fedexp.simulate`, in Flower's simulation and on real nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from fedexp.algorithms import Algorithm
from fedexp.engine import SimulationState
from fedexp.engine.loop import Trained, train_client
from fedexp.engine.work import Work
from fedexp.errors import require
from fedexp.flower.identity import partition_of
from fedexp.flower.request import Request, single_record
from fedexp.flower.wire import Places, from_arrays, to_arrays
from fedexp.local import LocalTraining
from fedexp.objective import Buffers, ModuleObjective, changed_buffers
from fedexp.precision import arithmetic, default_precision
from fedexp.tasks.task import Task

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
        shared=places.gather(request.shared, params.device),
        clients={client: places.gather(request.mine, params.device)},
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
