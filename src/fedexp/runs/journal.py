"""`Journal`: the rows and states of a run on the disk, as they come, and how it ended."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.runs.atomic import telling, write_bytes, write_json
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    Checkpoints,
    read_checkpoint,
)
from fedexp.runs.folder import MODEL, RESULT, RunFolder, RunWarning
from fedexp.runs.manifest import Checkpoint
from fedexp.runs.records import DamagedError, RecordFile, Row, read_rows

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
    rules = [value for value in (*state.server.values(), *state.shared.values()) if value.ndim]
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
