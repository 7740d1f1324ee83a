"""ClientApps on a fedexp task: with a loop as users write it, and as the simulator trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.engine.plan import Work
from fedexp.flower import (
    LocalRule,
    RuleStrategy,
    report_client_id,
    simulated_evaluate,
    simulated_train,
)
from fedexp.tasks import Task
from tests.helpers.problems import BatchNormNet, classes_task

Loop = Callable[[nn.Module, Optimizer, LocalRule, Iterator[Batch]], None]
MakeOptimizer = Callable[[nn.Module], Optimizer]
LR = 0.1


def float64_task(build: Callable[[], nn.Module] = BatchNormNet) -> Task:
    """A task in float64: BatchNorm magnifies the rounding of float32."""
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


def simulator_batches(task: Task, message: Message, client: int) -> Iterator[Batch]:
    """The batches of the simulator, so that the two can be compared."""
    config: Any = message.content.config_records["config"]
    work = Work(
        task, fx.fedavg(), task.local, "uniform", 0, config["server-round"], np.array([client])
    )
    return work.batches(client)


def user_app(
    task: Task, optimizer: MakeOptimizer = plain_sgd, loop: Loop = plain_loop, bare: bool = False
) -> ClientApp:
    """The app; `LocalRule` is not given the optimiser where it is `bare`."""
    app = ClientApp()
    report_client_id(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        model = loaded(task, message)
        optim = optimizer(model)
        local = LocalRule(message, context, model, *([] if bare else [optim]))
        loop(model, optim, local, simulator_batches(task, message, client))
        return local.reply({"num-examples": int(task.train.sizes[client])})

    return app


class TiedNet(nn.Module):
    """One matrix under two names, and a float buffer that training changes."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        if self.training:
            self.centre = 0.5 * self.centre + 2.0 * hidden.detach().mean(dim=0)
        out: Tensor = self.last(hidden)
        return out


class ConstantBufferNet(TiedNet):
    """The same with a buffer that never changes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        out: Tensor = self.last(hidden)
        return out


def plain_task_app(task: Task) -> ClientApp:
    """The same training without anything of this package."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        model = loaded(task, message)
        optimizer = plain_sgd(model)
        none: Any = None
        plain_loop(model, optimizer, none, simulator_batches(task, message, client))
        metrics = MetricRecord({"num-examples": int(task.train.sizes[client])})
        content = RecordDict({"arrays": ArrayRecord(dict(model.state_dict()))})
        content["metrics"] = metrics
        return Message(content, reply_to=message)

    return app


def simulated_app(task: Task, seed: int = 0) -> ClientApp:
    """An app whose clients train and evaluate as those of the simulator."""
    app = ClientApp()
    app.train()(simulated_train(task, seed=seed))
    app.evaluate()(simulated_evaluate(task))
    report_client_id(app)
    return app


def uniform_strategy(algorithm: fx.Algorithm, **options: Any) -> RuleStrategy:
    """A strategy that samples and weights clients as the simulator does."""
    options = {
        "fraction_evaluate": 0.0,
        "weighting": "uniform",
        "query_client_ids": True,
        **options,
    }
    return RuleStrategy(algorithm=algorithm, **options)


def control(made: RuleStrategy) -> Tensor:
    """The server control variate of SCAFFOLD."""
    assert made.run is not None
    return made.run.state.broadcast["control"]
