"""Engines: they run rounds. All compute the same numbers, but for the masks of dropout."""

from fedexp.engine.select import EngineName
from fedexp.engine.simulation import run_round
from fedexp.engine.state import EngineChoice, Record, SimulationState

__all__ = ["EngineChoice", "EngineName", "Record", "SimulationState", "run_round"]
