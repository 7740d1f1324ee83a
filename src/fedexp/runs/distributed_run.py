"""A kept run on many ranks: the first holds the folder, and the others follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fedexp import __version__
from fedexp.distributed import DistributedGroup, Ranks
from fedexp.engine import SimulationState
from fedexp.engine.client_store import ClientStates, ClientStore
from fedexp.errors import DivergedError, FedExPError, require
from fedexp.runs.checkpoint import (
    client_tensors,
    clients_from,
    from_bytes,
    model_tensors,
    state_from,
    to_bytes,
)
from fedexp.runs.files import Row
from fedexp.runs.fingerprint import joined
from fedexp.runs.journal import Keeping, Stopped, device_of, remaining
from fedexp.runs.spec import Outcome, Run, run_id

SENT_BYTES = 2**26  # of clients' states at a time


@dataclass(frozen=True)
class Opened:
    """Where a run is to go on: its rows, and its state but for the clients'."""

    rows: Sequence[Row]
    round: int = 0
    steps: int = 0
    model: bytes | None = None


class Lead:
    """What the first rank tells the others of a folder; where it is alone, it tells nobody.

    Args:
        ranks: those to tell.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks, self._opened = ranks, False

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A folder that cannot be opened is an error of all ranks."""
        try:
            yield
        except FedExPError as error:
            if self._ranks is not None and not self._opened:
                self._ranks.broadcast(error)
            raise

    def opened(self, state: SimulationState | None, rows: Sequence[Row]) -> None:
        """The run begins, or goes on, on all ranks."""
        if self._ranks is None:
            return
        self._opened = True
        if state is None:
            self._ranks.broadcast(Opened(rows))
            return
        model = to_bytes(model_tensors(state))
        self._ranks.broadcast(Opened(rows, state.round, state.steps, model))
        for clients in _blocks(state):
            self._ranks.broadcast((clients, to_bytes(client_tensors(state, clients))))
        self._ranks.broadcast(None)

    def over(self, outcome: Outcome) -> Outcome:
        """What came out of it, on all ranks."""
        return outcome if self._ranks is None else self._ranks.broadcast(outcome)


def check_alike(run: Run, ranks: Ranks) -> None:
    """Refuse ranks that would not train the same run with the same software."""
    own = f"run {run_id(run)} with fedexp {__version__} and torch {torch.__version__}"
    for rank, theirs in enumerate(found := ranks.gather(own)):
        require(
            theirs == found[0],
            f"rank {rank} has {theirs}, but rank 0 has {found[0]}; start all ranks with the same "
            "command and versions",
        )
    for rank, content in enumerate(contents := ranks.gather(run.fingerprint)):
        apart = contents[0].differences(content)
        require(
            not apart,
            f"rank {rank} has other content than rank 0: {joined(apart)}; give all ranks the same "
            "files and code",
        )


def follow(run: Run, folder: Path, how: Keeping, process_group: DistributedGroup) -> Outcome:
    """Train with the first rank, which alone reads and writes the folder."""
    ranks = process_group.ranks
    word: Opened | Outcome | FedExPError = ranks.receive()
    if isinstance(word, FedExPError):
        raise word
    if isinstance(word, Outcome):
        return word
    keep = ClientStore(how.client_store)
    state = None if word.model is None else _received(run, word, keep, process_group)
    with suppress(DivergedError):
        for record in remaining(run, state, word.rows, keep, process_group):
            if process_group.stopping and record.round < run.rounds:
                raise Stopped(folder, record.round)
    outcome: Outcome = ranks.receive()
    return outcome


def _received(
    run: Run, word: Opened, keep: ClientStore, process_group: DistributedGroup
) -> SimulationState:
    """The state that the first rank sends; the clients' part by part."""
    device = device_of(run)
    state = state_from(word.round, word.steps, from_bytes(word.model or b"", device), {})
    fresh = run.setup.algorithm.client.init_client_state(state.params)
    clients = ClientStates.of(keep.store({}, fresh, run.task.train.clients, process_group.beside))
    while (block := process_group.ranks.receive()) is not None:
        clients = clients.updated(clients_from(from_bytes(block[1], device), block[0]))
    return state_from(word.round, word.steps, model_tensors(state), clients)


def _blocks(state: SimulationState) -> Iterator[list[int]]:
    """The clients that keep something, so many at a time as may be sent together."""
    clients = list(state.clients)
    if not clients:
        return
    size = sum(value.nbytes for value in state.clients[clients[0]].values())
    together = max(1, SENT_BYTES // max(size, 1))
    for at in range(0, len(clients), together):
        yield clients[at : at + together]
