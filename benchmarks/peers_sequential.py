"""FedAvg in plain PyTorch, written as the paper's authors wrote theirs.

One model and optimiser per client, one client after another, batches from a shuffling `DataLoader`,
and the sum of state dictionaries at the end.
"""

from __future__ import annotations

import time
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from peers_work import LR, PeerWork, assignment, report

State = dict[str, Tensor]


def train(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], epochs: int, device: str
) -> State:
    """Train a client's copy of the model; return its state dictionary."""
    optimiser, loss = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            optimiser.step()
    return model.state_dict()


def one_round(
    model: nn.Module,
    work: PeerWork,
    loaders: list[DataLoader[tuple[Tensor, ...]]],
    rng: np.random.Generator,
    device: str,
) -> None:
    """Replace the model by the mean of the cohort's models."""
    total: State = {}
    for client in rng.choice(work.clients, work.cohort, replace=False):
        state = train(deepcopy(model), loaders[client], work.epochs, device)
        total = {name: total[name] + value if total else value for name, value in state.items()}
    model.load_state_dict({name: value / work.cohort for name, value in total.items()})
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    job = assignment()
    work, (x, y) = job.work, job.work.data()
    loaders = [
        DataLoader(TensorDataset(x[c], y[c]), work.batch, shuffle=True) for c in range(work.clients)
    ]
    torch.manual_seed(0)
    model, rng, times = work.build().to(job.device), np.random.default_rng(0), []
    for _ in range(job.rounds):
        began = time.perf_counter()
        one_round(model, work, loaders, rng, job.device)
        times.append(1e3 * (time.perf_counter() - began))
    report(times)


if __name__ == "__main__":
    main()
