"""A ClientApp as people write them, on a fedexp task: its loop is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.engine.plan import Work
from fedexp.flower import LocalRule, identify
from fedexp.tasks import Task
from tests.helpers.problems import BatchNormNet, classes_task

Loop = Callable[[nn.Module, Optimizer, LocalRule, Iterator[Batch]], None]
MakeOptimizer = Callable[[nn.Module], Optimizer]
LR = 0.1


def float64_task(build: Callable[[], nn.Module] = BatchNormNet) -> Task:
    """In float64, where equality can be asked for: BatchNorm magnifies float32's rounding."""
    task = classes_task(lambda: build().double())
    x = task.train.fields["x"].double()
    return replace(task, train=replace(task.train, fields={**task.train.fields, "x": x}), test=None)


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR)


def plain_loop(
    model: nn.Module, optimizer: Optimizer, local: LocalRule, batches: Iterator[Batch]
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()


def loaded(task: Task, message: Message) -> nn.Module:
    model: nn.Module = task.objective.build()  # type: ignore[attr-defined]
    sent = next(iter(message.content.array_records.values()))
    model.load_state_dict(sent.to_torch_state_dict())
    return model.train()


def planned_batches(task: Task, message: Message, client: int) -> Iterator[Batch]:
    """The batches that the simulator would use, so that the two can be compared."""
    config: Any = message.content.config_records["config"]
    work = Work(
        task, fx.fedavg(), task.local, "uniform", 0, config["server-round"], np.array([client])
    )
    return work.batches(client)


def user_app(
    task: Task, optimizer: MakeOptimizer = plain_sgd, loop: Loop = plain_loop, bare: bool = False
) -> ClientApp:
    """The app; where it is `bare`, the rule is not told of the optimiser."""
    app = ClientApp()
    identify(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        model = loaded(task, message)
        optim = optimizer(model)
        local = LocalRule(message, context, model, *([] if bare else [optim]))
        loop(model, optim, local, planned_batches(task, message, client))
        return local.reply({"num-examples": int(task.train.sizes[client])})

    return app
