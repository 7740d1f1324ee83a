"""Server rules: pure functions from the sums of a round to the next model."""

from fedexp.server.adaptive import Adagrad, Adam, Yogi
from fedexp.server.averaging import Average, Momentum
from fedexp.server.base import Metrics, ServerRule, State
from fedexp.server.extrapolation import ExP, MomentumExP, exp_step_size

__all__ = [
    "Adagrad",
    "Adam",
    "Average",
    "ExP",
    "Metrics",
    "Momentum",
    "MomentumExP",
    "ServerRule",
    "State",
    "Yogi",
    "exp_step_size",
]
