"""The model, the data and the evaluation. Put your own here; nothing else knows of digits."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fedexp as fx


class Net(nn.Module):
    """One hidden layer, for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def load_data(context: Context) -> TensorDataset:
    """Return the training examples of the client that runs at this node."""
    clients = int(context.run_config["clients"])
    partition = context.node_config.get("partition-id")
    if not isinstance(partition, int) or not 0 <= partition < clients:
        raise fx.UsageError(
            f"partition-id is {partition!r}; start the node with --node-config 'partition-id=0', a "
            f"number of its own from 0 to {clients - 1}"
        )
    examples = digits(clients, int(context.run_config["seed"])).train.client(partition)
    return TensorDataset(examples["x"], examples["y"])


def evaluate(model: nn.Module, context: Context) -> dict[str, float]:
    """Return loss and accuracy on the test set, which the server holds."""
    test = digits(int(context.run_config["clients"]), int(context.run_config["seed"])).test
    assert test is not None
    model.eval()
    with torch.no_grad():
        logits = model(test["x"])
    return {
        "test_loss": cross_entropy(logits, test["y"]).item(),
        "test_accuracy": (logits.argmax(1) == test["y"]).double().mean().item(),
    }


@cache
def digits(clients: int, seed: int) -> fx.Task:
    """Return handwritten digits, dealt to clients that have few digits each."""
    return fx.tasks.digits(clients=clients, seed=seed)
