"""The server: from the configuration to a strategy, and its rounds."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedexp_baseline.dataset import experiment_of
from fedexp_baseline.model import evaluation, initial_model
from fedexp_baseline.strategy import make_strategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    experiment = experiment_of(context)
    make_strategy(experiment, context).start(
        grid,
        initial_model(experiment),
        num_rounds=int(context.run_config["num-server-rounds"]),
        timeout=float(context.run_config["timeout"]),
        evaluate_fn=evaluation(experiment),
    )
