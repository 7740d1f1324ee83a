"""Engines: they run rounds. All compute the same numbers."""

from fedexp.engine.select import EngineName
from fedexp.engine.simulation import run_round, simulate
from fedexp.engine.state import EngineChoice, Record, SimulationState

__all__ = ["EngineChoice", "EngineName", "Record", "SimulationState", "run_round", "simulate"]
