"""How a run is kept and watched, and what it says when it is asked to stop.

`Journal`: the rows and states of a run on the disk, as they come, and how it ended.

A simulated run at work on its folder: records are kept, and the end is written.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedexp.distributed import DistributedGroup
from fedexp.engine import Record, SimulationState
from fedexp.engine.client_store import ClientStore, Where
from fedexp.engine.simulation import ProcessGroup
from fedexp.errors import DivergedError, FedExPError, UsageError
from fedexp.objective import Buffers, LoadableObjective
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    SLOTS,
    Checkpoint,
    Checkpoints,
    make_private,
    read_checkpoint,
    to_bytes,
)
from fedexp.runs.files import (
    DamagedError,
    RecordFile,
    Row,
    read_rows,
    telling,
    write_bytes,
    write_json,
)
from fedexp.runs.folder import MODEL, RESULT, RunFolder, RunWarning
from fedexp.runs.loggers import Consumer
from fedexp.runs.spec import Run

CHECKPOINT_EVERY = 10.0  # seconds


class Stopped(FedExPError):
    """A run was asked to stop, and did after `round`; it can go on from `folder`."""

    def __init__(self, folder: Path | None, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.folder, self.round = folder, round


@dataclass(frozen=True)
class Keeping:
    """How a run is kept and watched; none of it changes what is computed.

    Args:
        checkpoint_every: seconds between checkpoints; 0 for one a round.
        restart: discard what the folder holds of this run, and start over.
        reopen: continue a run that ended as diverged from its last checkpoint.
        stop: asked after every round whether to stop there.
        consumers: told of the beginning, of every new round and of the end.
        client_store: where client state is stored: "memory", "disk", or "auto" for what fits.
        process_group: the ranks that share the run; None for a single process.
        on_open: told once of the folder, of how many rounds it holds already, and whether that
            is all of them.
    """

    checkpoint_every: float = CHECKPOINT_EVERY
    restart: bool = False
    reopen: bool = False
    stop: Callable[[], bool] = lambda: False
    consumers: Sequence[Consumer] = ()
    client_store: Where = "auto"
    process_group: DistributedGroup | None = None
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None


COSTS = 10  # a checkpoint may take a tenth of the time, whatever interval was asked for


class Journal:
    """Everything of a run that is on the disk and changes while it trains.

    Args:
        folder: the run's own, held.
        every: seconds between checkpoints; 0 for one a round.
        device: where the tensors of a state that is read are to be.
    """

    def __init__(self, folder: RunFolder, every: float, device: torch.device) -> None:
        self.folder, self.every = folder, every
        last, self.state, self.rows = _restored(folder.path, device)
        self.resumed_from = len(self.rows)
        self._records = RecordFile(folder.path, last.records_bytes if last else 0)
        self._checkpoints = Checkpoints(folder.path, last, self.state)
        self._began = self._checked = time.perf_counter()
        self._cost, self._before = 0.0, last.seconds if last else 0.0

    @property
    def seconds(self) -> float:
        """Time of the run so far, in all processes that worked on it."""
        return self._before + time.perf_counter() - self._began

    def add(self, row: Row, state: SimulationState) -> None:
        """Add the row of a round, and checkpoint where it is time."""
        with telling(self.folder.path):
            self._records.append(row)
        self.rows.append(row)
        self.state = state
        self._checkpoints.saw(state)
        if time.perf_counter() - self._checked >= max(self.every, COSTS * self._cost):
            self.checkpoint()

    def checkpoint(self, final: bool = False) -> None:
        """Write the state as it is; rows up to here are never cut off again.

        A state that is not finite is no state to continue from: the checkpoint before it stays.
        """
        if self.state is None or not is_finite(self.state):
            return
        began = time.perf_counter()
        with telling(self.folder.path):
            self._records.sync()
            self._checkpoints.write(self.state, self._records.size, self.seconds, final)
        self._checked = time.perf_counter()
        self._cost = self._checked - began if self.every else 0.0

    def conclude(
        self, status: str, model: bytes | None, error: DivergedError | None = None
    ) -> dict[str, Any]:
        """Write the last state, the model, and last of all the result, which marks the end."""
        self.checkpoint(final=error is None)
        result: dict[str, Any] = {
            "status": status,
            "rounds": len(self.rows),
            "diverged_at": error.round if error else None,
            "seconds": self.seconds,
        }
        with telling(self.folder.path):
            if error is not None:
                result["reason"] = error.what
            elif model is not None:
                write_bytes(self.folder.path / MODEL, model)
            write_json(self.folder.path / RESULT, result)
            self._checkpoints.settle(final=error is None)
        return result

    def close(self) -> None:
        self._records.close()


def is_finite(state: SimulationState) -> bool:
    """Return whether model and server state are finite; buffers need not be (a causal mask).

    Nor need single numbers of a rule: an eps of infinity is one.
    """
    recent = [params for params, _ in state.recent]
    rules = [value for value in (*state.server.values(), *state.broadcast.values()) if value.ndim]
    return all(bool(value.isfinite().all()) for value in (state.params, *recent, *rules))


Restored = tuple[Checkpoint | None, SimulationState | None, list[Row]]


def _restored(folder: Path, device: torch.device) -> Restored:
    """The newest checkpoint and its rows; the one before where either is damaged; or nothing."""
    if not any((folder / name).exists() for name in (NEWEST, BEFORE)):
        return None, None, []
    try:
        return _checkpoint_and_rows(folder, NEWEST, device)
    except DamagedError as error:
        reason = error.what
    try:
        found = _checkpoint_and_rows(folder, BEFORE, device)
    except DamagedError:
        raise UsageError(
            f"{folder} cannot go on: {reason}, and there is no whole checkpoint before it; nothing "
            "was changed; mend that, or begin again with --restart"
        ) from None
    warnings.warn(
        f"the newest checkpoint in {folder} is damaged ({reason}); going on from the one before, "
        f"of round {len(found[2])}",
        RunWarning,
        stacklevel=3,
    )
    return found


def _checkpoint_and_rows(folder: Path, name: str, device: torch.device) -> Restored:
    checkpoint, state = read_checkpoint(folder, name, device)
    rows = read_rows(folder, checkpoint.records_bytes)
    if len(rows) != checkpoint.round:
        raise DamagedError(f"{name} is of round {checkpoint.round}, its rows are {len(rows)}")
    return checkpoint, state, rows


class Session(Journal):
    """Everything that changes while a run trains.

    Args:
        run: what is trained.
        folder: the run's own, held.
        every: seconds between checkpoints; 0 for one a round.
        keep: where clients' states lie; on the disk, in the folder.
        process_group: the processes that train it.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        every: float,
        keep: Where = "auto",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(folder, every, device_of(run))
        self.run, self._process_group = run, process_group
        self._keep = ClientStore(keep, folder.path / SLOTS)
        if keep != "memory" and run.setup.algorithm.client.init_client_state(torch.zeros(1)):
            make_private(folder.path / SLOTS)

    def remaining(self) -> Iterator[Record]:
        """Train from where the run is to its end, if it is not there yet."""
        return remaining(self.run, self.state, self.rows, self._keep, self._process_group)

    def keep(self, record: Record) -> Row:
        """Add the row of a round, and checkpoint where it is time."""
        row = record.to_json()
        self.add(row, record.state)
        return row

    def finish(self, error: DivergedError | None) -> dict[str, Any]:
        """Write the end of the run: its model, or why it has none."""
        status = "diverged" if error else "target" if self._at_target() else "finished"
        model = None
        if error is None and self.state is not None:
            model = model_bytes(self.run, self.state)
        return self.conclude(status, model, error)

    def _at_target(self) -> bool:
        return bool(self.rows) and self.run.reached(self.rows[-1])


def remaining(
    run: Run,
    state: SimulationState | None,
    rows: Sequence[Row],
    keep: ClientStore,
    process_group: ProcessGroup | None = None,
) -> Iterator[Record]:
    """The records that a run has still to make: to its last round, or to its target."""
    if rows and (len(rows) >= run.rounds or run.reached(rows[-1])):
        return
    for record in run.records(state, keep, process_group):
        yield record
        if run.reached(record.to_json()):
            return


def model_bytes(run: Run, state: SimulationState) -> bytes:
    """The output model: a module's `state_dict`, or the plain parameters of what is none."""
    params, buffers = state.output()
    on_host = params.cpu(), Buffers(*(each.cpu() for each in buffers))
    objective = run.task.objective
    if isinstance(objective, LoadableObjective):
        return to_bytes(objective.load(*on_host).state_dict())
    return to_bytes({"params": on_host[0]})


def device_of(run: Run) -> torch.device:
    """Where the run's tensors are to be, as `simulate` decides it."""
    given = run.spec.device
    return torch.device(given) if given else next(iter(run.task.train.fields.values())).device
