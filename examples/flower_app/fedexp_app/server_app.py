"""The server: any algorithm of the package as a Flower strategy."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedexp.flower import RuleStrategy, SecureAggregation, central_evaluation, initial_arrays
from fedexp_app.settings import setup_of, task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, task = context.run_config, task_of(context)
    # For one algorithm and no configuration: strategy = fedexp.flower.FedExP()
    strategy = RuleStrategy(
        fraction_train=float(config["fraction"]),
        fraction_evaluate=0.0,  # the server has a test set of its own
        min_train_nodes=int(config["min-nodes"]),
        min_available_nodes=int(config["min-nodes"]),
        algorithm=setup_of(context, task).algorithm,
        weighting="uniform",  # as in the paper; leave it out to weigh by num-examples
        seed=int(config["seed"]),
        query_client_ids=True,  # cohorts follow the seed; the ClientApp calls report_client_id
        checkpoint=str(config["checkpoint"]) or None,
        name=task.name,
        secure=SecureAggregation(clip=float(config["clip"])) if config["secure"] else None,
    )
    strategy.start(
        grid,
        initial_arrays(task, int(config["seed"])),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=central_evaluation(task),
    )
