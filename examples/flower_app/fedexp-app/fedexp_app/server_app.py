"""The server: a strategy of this package where Flower's FedAvg would be."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fedexp as fx
from fedexp.flower import STRATEGIES, SecureAggregation
from fedexp_app.task import Net, evaluate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    name = str(config["algorithm"])
    if name not in STRATEGIES:
        raise fx.UsageError(f"unknown algorithm {name!r}; there are {', '.join(STRATEGIES)}")
    make: Any = STRATEGIES[name]  # where you need one algorithm only: fedexp.flower.FedExP
    strategy = make(
        fraction_train=float(config["fraction"]),
        fraction_evaluate=0.0,  # the server has a test set of its own
        min_train_nodes=int(config["min-nodes"]),
        min_available_nodes=int(config["min-nodes"]),
        weighting="uniform",  # as in the paper; leave it out to weigh by num-examples
        seed=int(config["seed"]),
        query_client_ids=True,  # cohorts follow the seed; the ClientApp calls report_client_id
        checkpoint=str(config["checkpoint"]) or None,
        name="digits",  # in reports
        secure=SecureAggregation(clip=float(config["clip"])) if config["secure"] else None,
    )

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(dict(evaluate(model, context)))

    torch.manual_seed(int(config["seed"]))
    strategy.start(
        grid,
        ArrayRecord(dict(Net().state_dict())),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate_fn,
    )
