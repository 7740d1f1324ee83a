"""FedAvg by fluke."""

from __future__ import annotations

import time
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver
from torch import nn

from peers_work import LR, PeerWork, assignment, report


class Stopwatch(FederationObserver):  # type: ignore[misc]
    """Milliseconds from the start of a round to its end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start_round(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def end_round(self, *_: Any, **__: Any) -> None:
        self.times.append(1e3 * (time.perf_counter() - self.began))


def splitter_of(work: PeerWork) -> DataSplitter:
    x, y = work.data()
    train = [
        FastDataLoader(x[c], y[c], num_labels=10, batch_size=work.batch, shuffle=True)
        for c in range(work.clients)
    ]
    container = DummyDataContainer(train, [None] * work.clients, None, num_classes=10)
    return DataSplitter(container)


def main() -> None:
    job = assignment()
    work = job.work
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    environment.set_evaluator(ClassificationEval(eval_every=10**9, n_classes=10))
    torch.manual_seed(0)
    client = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": LR},
        "scheduler": {"gamma": 1.0, "step_size": 1},
        "persistency": False,
    }
    options = DDict(client=client, server={"weighted": False}, model=work.build())
    algorithm, watch = FedAVG(work.clients, splitter_of(work), options), Stopwatch()
    algorithm.set_callbacks([watch])
    algorithm.run(job.rounds, work.cohort / work.clients, finalize=False)
    report(watch.times, "fluke-fl", "numpy")


if __name__ == "__main__":
    main()
