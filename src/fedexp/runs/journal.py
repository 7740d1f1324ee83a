"""`Journal`: the rows and states of one run while it trains, and how it ended.

A row is on the disk before anyone is notified of its round. A checkpoint follows at intervals; rows
up to it are never discarded, rows after it are computed again by whoever resumes the run.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedexp.engine import SimulationState
from fedexp.engine.slot_file import DamagedSlotError
from fedexp.errors import DamagedError, DivergedError, FedExPError
from fedexp.experiment import Row
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    SLOTS,
    Checkpoint,
    Checkpoints,
    States,
    read_checkpoint,
    stored_in,
)
from fedexp.runs.folder import MODEL, RESULT, RunFolder, RunWarning
from fedexp.runs.records import RecordFile, read_rows
from fedexp.storage import disk_errors, write_bytes, write_json

COST_RATIO = 10  # a checkpoint may take a tenth of the time, whatever the interval
Load = Callable[[SimulationState], SimulationState]


class RunInterrupted(FedExPError):
    """A run stopped on request after `round`; it can be resumed from `folder`."""

    def __init__(self, folder: Path | None, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.folder, self.round = folder, round


class Journal:
    """The rows and the state of a run, in its folder or in memory only.

    Args:
        folder: the run's own, locked by this process; None stores nothing.
        every: seconds between checkpoints; 0 for one per round, infinity for none at all.
        device: of the tensors of a state that is restored.
        load: returns a restored state with its client state where the run stores it.

    Attributes:
        rows: one per round.
        state: the state after the last of them; None before the first round.
        earlier: states before it that are stored with it.
        resumed_from: number of rounds that were stored before.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        every: float,
        device: torch.device,
        load: Load = lambda state: state,
    ) -> None:
        self.folder, self.every = folder, every
        last: Checkpoint | None = None
        self.state: SimulationState | None = None
        self.earlier: States = ()
        self.rows: list[Row] = []
        self._files: tuple[Path, RecordFile, Checkpoints] | None = None
        if folder is not None:
            restored = _restore(folder.path, device, load)
            checkpoints, self.state, self.earlier, self.rows = restored
            last = checkpoints.last
            records = RecordFile(folder.path, last.records_bytes if last else 0)
            self._files = folder.path, records, checkpoints
        self.resumed_from = len(self.rows)
        self._began = self._checked = time.perf_counter()
        self._cost, self._before = 0.0, last.seconds if last else 0.0

    @property
    def seconds(self) -> float:
        """Time of the run so far, over all processes that worked on it."""
        return self._before + time.perf_counter() - self._began

    def add(self, row: Row, state: SimulationState, earlier: States = ()) -> None:
        """Store the row of a round, and write a checkpoint if one is due."""
        if self._files is None:
            self.rows.append(row)
            self.state, self.earlier = state, earlier
            return
        path, records, checkpoints = self._files
        with disk_errors(path):
            records.append(row)
        self.rows.append(row)
        self.state, self.earlier = state, earlier
        checkpoints.saw(state)
        if time.perf_counter() - self._checked >= max(self.every, COST_RATIO * self._cost):
            self.checkpoint()

    def checkpoint(self, final: bool = False) -> None:
        """Write a checkpoint of the current state.

        A state that is not finite cannot be continued: the checkpoint before it stays.
        """
        if self._files is None or self.state is None or not is_finite(self.state):
            return
        path, records, checkpoints = self._files
        began = time.perf_counter()
        with disk_errors(path):
            records.sync()
            if self.every < math.inf:
                ends = (records.size, records.sha256, self.seconds, final)
                checkpoints.write(self.state, *ends, self.earlier)
        self._checked = time.perf_counter()
        self._cost = self._checked - began if self.every else 0.0

    def conclude(
        self, status: str, model: bytes | None, error: DivergedError | None = None
    ) -> dict[str, Any]:
        """Write the last state, the model, and finally the result, which marks the end.

        Args:
            status: "finished", "target", "diverged" or "pruned".
            model: the output model as a safetensors file; None where there is none.
            error: why the run diverged, if it did.
        """
        self.checkpoint(final=error is None)
        result: dict[str, Any] = {
            "status": status,
            "rounds": len(self.rows),
            "diverged_at": error.round if error else None,
            "seconds": self.seconds,
        }
        if error is not None:
            result["reason"] = error.what
        if self._files is not None:
            path, _, checkpoints = self._files
            with disk_errors(path):
                if error is None and model is not None:
                    write_bytes(path / MODEL, model)
                if error is None:  # one that diverged retains all, so that it can be reopened
                    checkpoints.settle(len(self.rows))
                write_json(path / RESULT, result)
        return result

    def close(self) -> None:
        """Close the file of records."""
        if self._files is not None:
            self._files[1].close()


def is_finite(state: SimulationState) -> bool:
    """Return whether model and server state are finite; buffers need not be (a causal mask).

    Nor need scalars of a rule: an eps of infinity is one.
    """
    recent = [params for params, _ in state.recent]
    rules = [value for value in (*state.server.values(), *state.broadcast.values()) if value.ndim]
    return all(bool(value.isfinite().all()) for value in (state.params, *recent, *rules))


Restored = tuple[Checkpoints, SimulationState | None, States, list[Row]]


def _restore(folder: Path, device: torch.device, load: Load) -> Restored:
    """Read the newest checkpoint and its rows; the one before where either is damaged."""
    if not any((folder / name).exists() for name in (NEWEST, BEFORE)):
        return Checkpoints(folder), None, (), []
    try:
        return _checkpoint_and_rows(folder, NEWEST, device, load)
    except DamagedError as error:
        reason = error.reason
    try:
        restored = _checkpoint_and_rows(folder, BEFORE, device, load)
    except DamagedError:
        raise DamagedError(
            f"{folder} cannot be resumed: {reason}, and there is no intact checkpoint before it; "
            "nothing was changed"
        ) from None
    warnings.warn(
        f"the newest checkpoint in {folder} is damaged ({reason}); resuming from the one before, "
        f"of round {len(restored[-1])}",
        RunWarning,
        stacklevel=3,
    )
    return restored


def _checkpoint_and_rows(folder: Path, name: str, device: torch.device, load: Load) -> Restored:
    checkpoint, state, earlier = read_checkpoint(folder, name, device)
    rows = read_rows(folder, checkpoint.records_bytes, checkpoint.records_sha256)
    if len(rows) != checkpoint.round:
        raise DamagedError(f"{name} is of round {checkpoint.round}, its rows are {len(rows)}")
    try:
        loaded = load(state)
    except DamagedSlotError:
        raise DamagedError(f"{SLOTS} is not as it was written") from None
    stored = stored_in(state.clients, folder)
    checkpoints = Checkpoints(folder, checkpoint, stored, loaded.clients, earlier)
    return checkpoints, loaded, earlier, rows
