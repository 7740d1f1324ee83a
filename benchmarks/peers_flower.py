"""FedAvg by Flower's simulation: Ray actors, one per core."""

from __future__ import annotations

import functools
import os
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from peers_work import LR, WORKS, assignment, report

ROUNDS_BEGAN: list[float] = []


@functools.cache
def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Return the data; called once per actor."""
    return WORKS[name].data()


def train(message: Message, context: Context) -> Message:
    """Train one client."""
    name = os.environ["PEER_WORK"]
    work, (xs, ys) = WORKS[name], data_of(name)
    torch.set_num_threads(1)
    model, loss = work.build(), nn.CrossEntropyLoss()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = (values[int(context.node_config["partition-id"])] for values in (xs, ys))
    for _ in range(work.epochs):
        for rows in torch.randperm(work.each).split(work.batch):
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    content = RecordDict()
    content["arrays"] = ArrayRecord(model.state_dict())
    content["metrics"] = MetricRecord({"num-examples": 1})  # uniform weights
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that records the start of each round."""

    def configure_train(self, *args: Any, **options: Any) -> Any:
        ROUNDS_BEGAN.append(time.perf_counter())
        return super().configure_train(*args, **options)


def main() -> None:
    job = assignment()
    work = job.work
    os.environ["PEER_WORK"] = next(name for name, each in WORKS.items() if each is work)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    client, server = ClientApp(), ServerApp()
    client.train()(import_module("peers_flower").train)  # by a module that actors can import

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        share = work.cohort / work.clients
        strategy = Timed(fraction_train=share, fraction_evaluate=0.0)
        start = ArrayRecord(work.build().state_dict())
        strategy.start(grid, start, num_rounds=job.rounds + 1)

    each: Any = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, work.clients, backend_config={"client_resources": each})
    times = [1e3 * (end - begin) for begin, end in pairwise(ROUNDS_BEGAN)]
    report(times, "flwr", "ray", "numpy")


if __name__ == "__main__":
    main()
