"""The strategy: a server step that grows with the disagreement of clients (Algorithm 1)."""

from __future__ import annotations

from flwr.app import Context

import fedexp as fx
from fedexp.flower import RuleStrategy


def make_strategy(experiment: fx.Experiment, context: Context) -> RuleStrategy:
    """Return the strategy of an experiment, which samples and weighs clients as the paper does."""
    config, clients = context.run_config, experiment.problem.train.clients
    cohort = min(int(config["clients-per-round"]), clients)
    return RuleStrategy(
        algorithm=experiment.setup.algorithm,
        fraction_train=cohort / clients,
        fraction_evaluate=0.0,  # the server has the test set
        min_train_nodes=cohort,
        min_available_nodes=clients,
        weighting="uniform",
        seed=experiment.seed,
        query_client_ids=True,  # cohorts follow the seed
        evaluate_every=int(config["evaluate-every"]),
        checkpoint=str(config["checkpoint"]) or None,
        name=experiment.problem.name,
    )
