"""While a round computes, what the next one reads is fetched: its clients' examples and states."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import Federation
from fedexp.data.prefetch import ask_for
from fedexp.engine.state import SimulationState
from fedexp.engine.state_store import StoredStates
from fedexp.engine.work import Work

LEAST_BYTES = 2**26  # of data: less is in memory anyway


class ReadAhead:
    """Asks the system for the next round's pages, in a thread of its own.

    Args:
        train: the clients' data; small ones and those on a device are left alone.
        mine: which part of a round's work is done here.
    """

    def __init__(self, train: Federation, mine: Callable[[Work], Work]) -> None:
        self._mine = mine
        held = [value for value in train.fields.values() if value.device.type == "cpu"]
        self._examples = sum(value.nbytes for value in held) >= LEAST_BYTES
        self._thread = ThreadPoolExecutor(1)
        self._begun = False

    def __call__(self, work: Work, state: SimulationState) -> None:
        """Begin to fetch what comes after `work`, which is about to be done."""
        states = state.clients if isinstance(state.clients, StoredStates) else None
        if self._examples or states is not None:
            train, work = work.task.train if self._examples else None, self._mine(work)
            if not self._begun:  # nobody has asked for the first, and it is needed now
                _ask(train, states, work.cohort)
            self._begun = True
            self._thread.submit(_ask, train, states, work.after().cohort)


def _ask(train: Federation | None, states: StoredStates | None, clients: NDArray[np.int64]) -> None:
    if train is not None:
        ask_for(train, clients)
    if states is not None:
        states.expect(clients)
