"""A stored run on many ranks: the first holds the folder and sends its state to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedexp import __version__
from fedexp.distributed import DistributedGroup, Ranks, check_device
from fedexp.engine import SimulationState
from fedexp.engine.client_store import ClientStates, ClientStore, Location, blocks
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
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.spec import Outcome, Run, run_id


def join_ranks(run: Run, ranks: Ranks, stop: Callable[[], bool]) -> DistributedGroup:
    """Return the process group of a run; refuse ranks that would not train the same one."""
    check_device(run.spec.device)
    check_same_content(run, ranks)
    return DistributedGroup(ranks, stop)


def check_same_content(run: Run, ranks: Ranks) -> None:
    """Refuse ranks with another run, other software, other data or other code."""
    own = f"run {run_id(run)} with fedexp {__version__} and torch {torch.__version__}"
    for rank, theirs in enumerate(found := ranks.all_gather_object(own)):
        require(
            theirs == found[0],
            f"rank {rank} has {theirs}, but rank 0 has {found[0]}; start all ranks with the same "
            "command and versions",
        )
    for rank, content in enumerate(contents := ranks.all_gather_object(run.fingerprint)):
        apart = contents[0].differences(content)
        require(
            not apart,
            f"rank {rank} has other content than rank 0: {joined(apart)}; give all ranks the same "
            "files and code",
        )


@dataclass(frozen=True)
class Opened:
    """The message that starts training: the rows so far, and the state without client state."""

    rows: Sequence[Row]
    round: int = 0
    steps: int = 0
    model: bytes | None = None


class Leader:
    """The first rank's messages to the others; within the block, an error is raised on all ranks.

    Args:
        ranks: the ranks of the job.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._opened = ranks, False

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send the error where the others still wait for the state of the run."""
        if isinstance(error, FedExPError) and not self._opened:
            self._ranks.broadcast(error)

    def opened(self, state: SimulationState | None, rows: Sequence[Row]) -> None:
        """Send the state to train from."""
        self._opened = True
        if state is None:
            self._ranks.broadcast(Opened(rows))
            return
        model = to_bytes(model_tensors(state))
        self._ranks.broadcast(Opened(rows, state.round, state.steps, model))
        clients = list(state.clients)
        first = state.clients[clients[0]] if clients else {}
        for some in blocks(clients, sum(value.nbytes for value in first.values())):
            self._ranks.broadcast((some, to_bytes(client_tensors(state, some))))
        self._ranks.broadcast(None)

    def finish(self, outcome: Outcome) -> Outcome:
        """Send the outcome, and return it."""
        return self._ranks.broadcast(outcome)


def follow(run: Run, folder: Path, where: Location, process_group: DistributedGroup) -> Outcome:
    """Train with the first rank, which alone accesses the folder.

    Args:
        run: what to train.
        folder: its folder, which is only named here.
        where: where client state is stored.
        process_group: the ranks.
    """
    ranks = process_group.ranks
    message: Opened | Outcome | FedExPError = ranks.receive()
    if isinstance(message, FedExPError):
        raise message
    if isinstance(message, Outcome):
        return message
    store, state = ClientStore(where), None
    if message.model is not None:
        state = _receive_state(run, message, message.model, store, process_group)
    with suppress(DivergedError):
        if not run.is_over(message.rows):
            for record in run.records(state, store, process_group):
                if run.reached(record.to_json()):
                    break
                if process_group.stopping and record.round < run.rounds:
                    raise RunInterrupted(folder, record.round)
    outcome: Outcome = ranks.receive()
    return outcome


def _receive_state(
    run: Run, message: Opened, model: bytes, store: ClientStore, process_group: DistributedGroup
) -> SimulationState:
    """Return the state that the first rank sends; client state comes in blocks."""
    state = state_from(message.round, message.steps, from_bytes(model, run.device), {})
    fresh = run.setup.algorithm.client.init_client_state(state.params)
    stored = store.store({}, fresh, run.task.train.clients, process_group.local_world_size)
    clients = ClientStates.of(stored)
    while (block := process_group.ranks.receive()) is not None:
        clients = clients.updated(clients_from(from_bytes(block[1], run.device), block[0]))
    return replace(state, clients=clients)
