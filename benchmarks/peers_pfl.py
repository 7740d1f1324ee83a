"""FedAvg by pfl-research: its simulated backend, one process or several under torchrun."""

from __future__ import annotations

import os
import time
from types import MethodType
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from peers_work import LR, PeerWork, assignment, report


class Stopwatch(TrainingProcessCallback):  # type: ignore[misc]
    """Milliseconds between the ends of rounds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.began = time.perf_counter()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.times.append(1e3 * (now - self.began))
        self.began = now
        return False, Metrics()


def model_of(work: PeerWork, device: str) -> PyTorchModel:
    torch.manual_seed(0)
    module, loss = work.build().to(device), nn.CrossEntropyLoss()

    def loss_of(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = loss(self.train()(x), y)
        return value

    module.loss = MethodType(loss_of, module)  # type: ignore[assignment]
    module.metrics = MethodType(lambda self, x, y: {}, module)  # type: ignore[assignment]
    server = torch.optim.SGD(module.parameters(), lr=1.0)
    return PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=server)


def federation_of(work: PeerWork, device: str) -> FederatedDataset:
    x, y = (part.to(device) for part in work.data())  # as its own benchmarks do

    def client(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((x[user], y[user]))

    return FederatedDataset(client, get_user_sampler("random", list(range(work.clients))))


def main() -> None:
    job = assignment()
    work = job.work
    np.random.seed(0)  # noqa: NPY002  its samplers draw from numpy's global generator
    data, watch = federation_of(work, job.device), Stopwatch()
    params = NNAlgorithmParams(
        central_num_iterations=job.rounds + 1,
        evaluation_frequency=10**9,  # evaluates in the first round alone
        train_cohort_size=work.cohort,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch
    )
    FederatedAveraging().run(
        params, SimulatedBackend(data, data), model_of(work, job.device), local, callbacks=[watch]
    )
    if os.environ.get("RANK", "0") == "0":
        report(watch.times[1:], "pfl", "numpy")


if __name__ == "__main__":
    main()
