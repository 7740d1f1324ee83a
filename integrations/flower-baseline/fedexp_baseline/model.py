"""The model: a CNN for EMNIST, ResNet-18 with group normalisation for CIFAR and CINIC-10."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord

import fedexp as fx
from fedexp.flower import central_evaluation, initial_arrays


def initial_model(experiment: fx.Experiment) -> ArrayRecord:
    """Return the model before the first round, which depends on the seed only."""
    return initial_arrays(experiment.problem, experiment.seed)


def evaluation(experiment: fx.Experiment) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return a function that evaluates a model on the server: losses and accuracies."""
    return central_evaluation(experiment.problem)
