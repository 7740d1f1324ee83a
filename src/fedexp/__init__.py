"""Federated optimisation that converges in half the rounds.

>>> import fedexp as fx
>>> for record in fx.simulate(fx.tasks.toy(), fx.fedexp(eps=0.0), rounds=30):
...     pass
>>> record.train_loss < 1e-3
True
"""

from fedexp import cohorts, data, models, projections, tasks
from fedexp.aggregate import Aggregate
from fedexp.algorithms import (
    Algorithm,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fedexp,
    fedexp_m,
    fedprox,
    fedprox_exp,
    fedyogi,
    scaffold,
    scaffold_exp,
)
from fedexp.client import SGD, ClientRule, Prox, Scaffold
from fedexp.engine import Record, SimulationState, simulate
from fedexp.errors import DivergedError, FedExPError, NonFiniteUpdateWarning, UsageError
from fedexp.local import LocalTraining
from fedexp.server import (
    Adagrad,
    Adam,
    Average,
    ExP,
    Momentum,
    MomentumExP,
    ServerRule,
    Yogi,
    exp_step_size,
)

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Aggregate",
    "Algorithm",
    "Average",
    "ClientRule",
    "DivergedError",
    "ExP",
    "FedExPError",
    "LocalTraining",
    "Momentum",
    "MomentumExP",
    "NonFiniteUpdateWarning",
    "Prox",
    "Record",
    "Scaffold",
    "ServerRule",
    "SimulationState",
    "UsageError",
    "Yogi",
    "cohorts",
    "data",
    "exp_step_size",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedexp",
    "fedexp_m",
    "fedprox",
    "fedprox_exp",
    "fedyogi",
    "models",
    "projections",
    "scaffold",
    "scaffold_exp",
    "simulate",
    "tasks",
]
