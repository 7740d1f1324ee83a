"""Server rules: pure functions from the sums of a round to the next model."""

from fedexp.server.adaptive import AMS, Adagrad, Adam, Yogi
from fedexp.server.averaging import Average, Momentum, NormalisedAverage
from fedexp.server.base import Metrics, ServerRule, State
from fedexp.server.extrapolation import ExP, MomentumExP, exp_step_size
from fedexp.server.step_sizes import Hypergradient, StochasticPolyak

__all__ = [
    "AMS",
    "Adagrad",
    "Adam",
    "Average",
    "ExP",
    "Hypergradient",
    "Metrics",
    "Momentum",
    "MomentumExP",
    "NormalisedAverage",
    "ServerRule",
    "State",
    "StochasticPolyak",
    "Yogi",
    "exp_step_size",
]
