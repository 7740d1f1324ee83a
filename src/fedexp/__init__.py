"""Federated learning in fewer rounds: FedExP and its baselines.

>>> import fedexp as fx
>>> for record in fx.simulate(fx.tasks.toy(), fx.fedexp(eps=0.0), rounds=30):
...     pass
>>> record.train_loss < 1e-3
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedexp import cohorts, data, models, projections, tasks
from fedexp.aggregate import Aggregate
from fedexp.algorithms import (
    Algorithm,
    diloco,
    diloco_local,
    fedadagrad,
    fedadam,
    fedams,
    fedavg,
    fedavgm,
    fedexp,
    fedexp_m,
    fedexprox,
    fedexprox_grads,
    fedexprox_stops,
    fedhyper,
    fednova,
    fedprox,
    fedprox_exp,
    fedyogi,
    scaffold,
    scaffold_exp,
)
from fedexp.client import SGD, ClientRule, Nova, Prox, ProxEnvelope, Scaffold
from fedexp.data import Federation
from fedexp.engine import Record, SimulationState
from fedexp.errors import DivergedError, FedExPError, NonFiniteUpdateWarning, UsageError
from fedexp.experiment import Experiment, Resources, simulate
from fedexp.local import LocalTraining
from fedexp.server import (
    AMS,
    Adagrad,
    Adam,
    Average,
    ExP,
    Hypergradient,
    Momentum,
    MomentumExP,
    NormalisedAverage,
    ServerRule,
    StochasticPolyak,
    Yogi,
    exp_step_size,
)
from fedexp.tasks import Goal, Metric, Task, classification, supervised

if TYPE_CHECKING:
    from fedexp import privacy
    from fedexp.api import Comparison, RunResult, compare, run, tune
    from fedexp.runs.weights import load_model, load_state, save_state
    from fedexp.tuning.results import Tuning

__version__ = "0.2.0"

__all__ = [
    "AMS",
    "SGD",
    "Adagrad",
    "Adam",
    "Aggregate",
    "Algorithm",
    "Average",
    "ClientRule",
    "Comparison",
    "DivergedError",
    "ExP",
    "Experiment",
    "FedExPError",
    "Federation",
    "Goal",
    "Hypergradient",
    "LocalTraining",
    "Metric",
    "Momentum",
    "MomentumExP",
    "NonFiniteUpdateWarning",
    "NormalisedAverage",
    "Nova",
    "Prox",
    "ProxEnvelope",
    "Record",
    "Resources",
    "RunResult",
    "Scaffold",
    "ServerRule",
    "SimulationState",
    "StochasticPolyak",
    "Task",
    "Tuning",
    "UsageError",
    "Yogi",
    "classification",
    "cohorts",
    "compare",
    "data",
    "diloco",
    "diloco_local",
    "exp_step_size",
    "fedadagrad",
    "fedadam",
    "fedams",
    "fedavg",
    "fedavgm",
    "fedexp",
    "fedexp_m",
    "fedexprox",
    "fedexprox_grads",
    "fedexprox_stops",
    "fedhyper",
    "fednova",
    "fedprox",
    "fedprox_exp",
    "fedyogi",
    "load_model",
    "load_state",
    "models",
    "privacy",
    "projections",
    "run",
    "save_state",
    "scaffold",
    "scaffold_exp",
    "simulate",
    "supervised",
    "tasks",
    "tune",
]

# Imported at first use: they need packages that the simulator does not.
_LATER = {
    **dict.fromkeys(("Comparison", "RunResult", "compare", "run", "tune"), "api"),
    "Tuning": "tuning.results",
    **dict.fromkeys(("load_model", "load_state", "save_state"), "runs.weights"),
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"fedexp.{_LATER[name]}"), name)
    if name == "privacy":
        return import_module("fedexp.privacy")
    raise AttributeError(f"module 'fedexp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
