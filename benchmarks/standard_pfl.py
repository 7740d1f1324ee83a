"""pfl-research for `standard.py`: its simulated backend, stopped after every round.

pfl owns its training loop, so it runs in a thread that waits after each round until the next one is
asked for. The data are on the device before, as in pfl's own benchmarks.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from threading import Semaphore, Thread
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
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from standard import COHORT, LR, Problem


class Pause(TrainingProcessCallback):  # type: ignore[misc]
    """Report the end of a round, then wait until the next one is asked for."""

    def __init__(self) -> None:
        self.next, self.done = Semaphore(0), Semaphore(0)

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.done.release()
        self.next.acquire()
        return False, Metrics()


class PflRounds:
    """An action that trains one round by pfl; the first call starts it.

    Args:
        problem: the work, with data on the device.
        device: "cpu" or "cuda".
        amp: type of mixed precision, or None.
    """

    def __init__(self, problem: Problem, device: str, amp: torch.dtype | None) -> None:
        self.problem, self.device, self.amp = problem, device, amp
        self.pause, self.thread = Pause(), Thread(target=self._start, daemon=True)
        self.error: BaseException | None = None

    def __call__(self) -> None:
        if self.thread.is_alive():
            self.pause.next.release()
        else:
            self.thread.start()
        self.pause.done.acquire()
        if self.error is not None:
            raise self.error
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _start(self) -> None:
        try:
            asyncio.set_event_loop(asyncio.new_event_loop())  # which pfl expects of its thread
            self._run()
        except BaseException as error:  # raised where the round was asked for
            self.error = error
            self.pause.done.release()

    def _run(self) -> None:
        problem = self.problem
        x, y, offsets = problem.fields["x"], problem.fields["y"], problem.offsets
        np.random.seed(0)  # noqa: NPY002  its samplers draw from numpy's global generator

        def client(user: int) -> PyTorchTensorDataset:
            rows = slice(int(offsets[user]), int(offsets[user + 1]))
            return PyTorchTensorDataset((x[rows], y[rows]))

        users = iter(chain(*problem.cohorts, *problem.cohorts))
        data = FederatedDataset(client, lambda: next(users))
        params = NNAlgorithmParams(
            central_num_iterations=len(problem.cohorts) + 1,
            evaluation_frequency=10**9,  # evaluates in the first round alone
            train_cohort_size=COHORT,
            val_cohort_size=0,
        )
        local = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=problem.batch
        )
        backend = SimulatedBackend(data, data)
        FederatedAveraging().run(params, backend, self._model(), local, callbacks=[self.pause])

    def _model(self) -> PyTorchModel:
        torch.manual_seed(0)
        module, loss = self.problem.build().to(self.device), self.problem.loss

        def loss_of(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.train()(x), y)

        module.loss = MethodType(loss_of, module)  # type: ignore[assignment]
        module.metrics = MethodType(lambda self, x, y: {}, module)  # type: ignore[assignment]
        server = torch.optim.SGD(module.parameters(), lr=1.0)
        return PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=server,
            amp_dtype=self.amp,
        )
