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
from fedexp.engine.client_store import ClientStates, ClientStore, blocks
from fedexp.errors import DivergedError, FedExPError, require
from fedexp.experiment import Experiment, Resources, Row
from fedexp.runs.checkpoint import client_tensors, clients_from, model_tensors, state_from
from fedexp.runs.fingerprint import fingerprint_of, joined
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.spec import Outcome
from fedexp.storage import from_bytes, to_bytes


def join_ranks(experiment: Experiment, ranks: Ranks, stop: Callable[[], bool]) -> DistributedGroup:
    """Return the process group of a run; refuse ranks that would not train the same one."""
    check_device(experiment.device)
    check_same_content(experiment, ranks)
    return DistributedGroup(ranks, stop)


def check_same_content(experiment: Experiment, ranks: Ranks) -> None:
    """Refuse ranks with another run, other software, other data or other code."""
    text = f"run {experiment.id} with fedexp {__version__} and torch {torch.__version__}"
    for rank, other in enumerate(texts := ranks.all_gather_object(text)):
        require(
            other == texts[0],
            f"rank {rank} has {other}, but rank 0 has {texts[0]}; start all ranks with the same "
            "command and versions",
        )
    for rank, content in enumerate(contents := ranks.all_gather_object(fingerprint_of(experiment))):
        differing = contents[0].differences(content)
        require(
            not differing,
            f"rank {rank} has other content than rank 0: {joined(differing)}; give all ranks "
            "the same files and code",
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


def follow(
    experiment: Experiment, folder: Path, resources: Resources, process_group: DistributedGroup
) -> Outcome:
    """Train with the first rank, which alone accesses the folder.

    Args:
        experiment: what to train.
        folder: its folder, which is only named here.
        resources: where client state is stored.
        process_group: the ranks.
    """
    ranks = process_group.ranks
    message: Opened | Outcome | FedExPError = ranks.receive()
    if isinstance(message, FedExPError):
        raise message
    if isinstance(message, Outcome):
        return message
    store, state = resources.client_store, None
    store = store if isinstance(store, ClientStore) else ClientStore(store)
    if message.model is not None:
        state = _receive_state(experiment, message, message.model, store, process_group)
    within = Resources(client_store=store, process_group=process_group)
    with suppress(DivergedError):
        if not experiment.is_over(message.rows):
            for record in experiment.records(state, within):
                over = record.round == experiment.length or experiment.reached(record.to_json())
                if process_group.stopping and not over:
                    raise RunInterrupted(folder, record.round)
    outcome: Outcome = ranks.receive()
    return outcome


def _receive_state(
    experiment: Experiment,
    message: Opened,
    model: bytes,
    store: ClientStore,
    process_group: DistributedGroup,
) -> SimulationState:
    """Return the state that the first rank sends; client state comes in blocks."""
    device = experiment.train_device
    state = state_from(message.round, message.steps, from_bytes(model, device), {})
    fresh = experiment.setup.init_client_state(state.params)
    number = experiment.problem.train.clients
    clients = ClientStates.of(store.store({}, fresh, number, process_group.local_world_size))
    while (block := process_group.ranks.receive()) is not None:
        clients = clients.updated(clients_from(from_bytes(block[1], device), block[0]))
    return replace(state, clients=clients)
