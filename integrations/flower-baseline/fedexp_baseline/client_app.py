"""The client: local SGD with the batches, augmentation and step sizes of the paper's setting."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedexp.flower import report_client_id, simulated_evaluate, simulated_train
from fedexp_baseline.dataset import experiment_of

app = ClientApp()
report_client_id(app)


@app.train()
def train(msg: Message, context: Context) -> Message:
    experiment = experiment_of(context)
    local = experiment.setup.local
    return simulated_train(experiment.problem, local, experiment.seed)(msg, context)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return simulated_evaluate(experiment_of(context).problem)(msg, context)
