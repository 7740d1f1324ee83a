"""Reads the examples and client states of the next round from the disk while a round computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fedexp.data.federation import Federation
from fedexp.data.streaming import prefetch_pages
from fedexp.engine.client_store import StoredStates
from fedexp.engine.plan import Numbers, Work
from fedexp.engine.state import SimulationState

LEAST_BYTES = 2**26  # of examples to read ahead; less is in memory anyway


class ReadAhead:
    """Asks the system to read what the next round needs, in a thread.

    Args:
        train: the clients' data; small fields and those on a device are not read ahead.
        shard: returns the part of a round that this process trains.
    """

    def __init__(self, train: Federation, shard: Callable[[Work], Work]) -> None:
        on_host = [value for value in train.fields.values() if value.device.type == "cpu"]
        self._examples = sum(value.nbytes for value in on_host) >= LEAST_BYTES
        self._shard, self._thread = shard, ThreadPoolExecutor(1)
        self._started = False

    def __call__(self, work: Work, state: SimulationState) -> None:
        """Start to read the examples and client states of the round after `work`."""
        readers = list[Callable[[Numbers], object]]()
        if self._examples:
            readers.append(partial(prefetch_pages, work.task.train))
        if isinstance(state.clients, StoredStates):
            readers.append(state.clients.prefetch)
        if not readers:
            return
        work = self._shard(work)
        following = work.after().cohort
        for read in readers:
            if not self._started:  # the first round was not read ahead, and is needed now
                read(work.cohort)
            self._thread.submit(read, following)
        self._started = True
