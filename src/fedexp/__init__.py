"""Federated optimisation that converges in half the rounds.

>>> import fedexp as fx
>>> for record in fx.simulate(fx.tasks.toy(), fx.fedexp(eps=0.0), rounds=30):
...     pass
>>> record.train_loss < 1e-3
True
"""

from typing import TYPE_CHECKING, Any

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
from fedexp.data import Federation
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
from fedexp.tasks import classification

if TYPE_CHECKING:
    from fedexp.study import (
        Comparison,
        RunResult,
        Tuning,
        compare,
        load_model,
        load_state,
        run,
        save_state,
        tune,
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
    "Comparison",
    "DivergedError",
    "ExP",
    "FedExPError",
    "Federation",
    "LocalTraining",
    "Momentum",
    "MomentumExP",
    "NonFiniteUpdateWarning",
    "Prox",
    "Record",
    "RunResult",
    "Scaffold",
    "ServerRule",
    "SimulationState",
    "Tuning",
    "UsageError",
    "Yogi",
    "classification",
    "cohorts",
    "compare",
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
    "load_model",
    "load_state",
    "models",
    "projections",
    "run",
    "save_state",
    "scaffold",
    "scaffold_exp",
    "simulate",
    "tasks",
    "tune",
]

# Imported at first use: they need packages that the simulator does not.
_STUDY = (
    *("Comparison", "RunResult", "Tuning", "compare", "load_model", "load_state", "run"),
    *("save_state", "tune"),
)


def __getattr__(name: str) -> Any:
    if name in _STUDY:
        from fedexp import study

        return getattr(study, name)
    raise AttributeError(f"module 'fedexp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_STUDY})
