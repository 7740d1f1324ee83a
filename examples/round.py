"""FedAvg and FedExP in plain torch, readable from top to bottom: one file, one round after another.

The package does nothing else; it does it faster, for any rule, model and data. Only the draws come
from it (initial weights, cohorts, batches), so that the numbers are those of `fedexp.simulate`,
which a test compares. Run it with: python examples/round.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedexp as fx
from fedexp.engine.plan import plan_batches, sample_cohort
from fedexp.seeding import seeded_torch

LOCAL = fx.LocalTraining(lr=0.1, steps=20, batch_size=20)  # τ = 20 steps of η_l = 0.1
COHORT, ROUNDS, SEED, EPS = 10, 40, 0, 1e-3  # clients per round of all 50
Data = tuple[Tensor, Tensor]  # examples and labels of a client


def local_update(model: nn.Module, w: Tensor, data: Data, client: int, round: int) -> Tensor:
    """Train on a client's data from the server's weights w; return Δ_i = w - w_i (eq. 3)."""
    x, y = data
    vector_to_parameters(w.clone(), model.parameters())
    for rows in plan_batches(SEED, round, client, len(y), LOCAL):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.sub_(LOCAL.lr * grad)
    return w - parameters_to_vector(model.parameters()).detach()


def fedavg_step(deltas: Tensor) -> float:
    """Return the server step size of FedAvg: it moves to the mean of the clients' models."""
    return 1.0


def fedexp_step(deltas: Tensor) -> float:
    """Return the server step size of FedExP (eq. 8): long where the M updates [M, d] disagree."""
    mean_squared_norm = deltas.double().square().sum(dim=1).mean()
    squared_norm_of_mean = deltas.mean(dim=0).double().square().sum()
    return max(1.0, (mean_squared_norm / (2 * (squared_norm_of_mean + EPS))).item())


def train(model: nn.Module, clients: list[Data], fedexp: bool) -> Iterator[tuple[float, Tensor]]:
    """Yield the server step size and the weights of the output model of every round."""
    w = parameters_to_vector(model.parameters()).detach().clone()
    before: Tensor | None = None
    for round in range(1, ROUNDS + 1):
        # 1. The server draws a cohort, and sends it the weights.
        cohort = sample_cohort(SEED, round, len(clients), COHORT)

        # 2. Each client takes a few local steps, and sends back its update.
        deltas = torch.stack([local_update(model, w, clients[i], i, round) for i in cohort])

        # 3. The server steps against the mean update: with length 1, or extrapolated.
        step = fedexp_step(deltas) if fedexp else fedavg_step(deltas)
        w = w - step * deltas.mean(dim=0)

        # 4. The output is not the model that is trained on: FedExP oscillates around the optimum,
        #    so it evaluates the mean of the last two iterates, and trains on from the last one.
        output = w if before is None or not fedexp else (before + w) / 2
        before = w
        yield step, output


def main() -> None:
    """Train logistic regression on 50 clients of the digits; print a line per ten rounds."""
    task = fx.tasks.digits()
    clients = [(batch["x"], batch["y"]) for batch in map(task.train.client, range(50))]
    assert task.test is not None
    x, y = task.test["x"], task.test["y"]
    for fedexp in (False, True):
        with seeded_torch(SEED, "initial weights"):
            model = nn.Linear(64, 10)
        print("FedExP" if fedexp else "FedAvg")
        for round, (step, output) in enumerate(train(model, clients, fedexp), start=1):
            if round % 10 == 0:
                vector_to_parameters(output, model.parameters())
                accuracy = (model(x).argmax(dim=1) == y).double().mean().item()
                print(f"  round {round}  step {step:.2f}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
