"""A run at work on its folder: rows are added, states checkpointed, and the end is written."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.engine import Record, SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.experiments.compare import Row
from fedexp.experiments.spec import Run
from fedexp.objective import Buffers
from fedexp.runs.atomic import telling, write_bytes, write_json
from fedexp.runs.checkpoint import (
    BEFORE,
    NEWEST,
    Checkpoint,
    Checkpoints,
    read_checkpoint,
)
from fedexp.runs.folder import MODEL, RESULT, RunFolder, RunWarning
from fedexp.runs.records import DamagedError, RecordFile, read_rows
from fedexp.runs.tensors import to_bytes

COSTS = 10  # a checkpoint may take a tenth of the time, whatever interval was asked for


class Session:
    """Everything that changes while a run trains.

    Args:
        folder: the run's own, held.
        every: seconds between checkpoints; 0 for one a round.
    """

    def __init__(self, folder: RunFolder, every: float) -> None:
        self.run, self.folder, self.every = folder.run, folder, every
        last, self.state, self.rows = _restored(folder.path, _device(folder.run))
        self.resumed_from = len(self.rows)
        self._records = RecordFile(folder.path, last.records_bytes if last else 0)
        self._checkpoints = Checkpoints(folder.path, last, self.state)
        self._began = self._checked = time.perf_counter()
        self._cost, self._before = 0.0, last.seconds if last else 0.0

    @property
    def seconds(self) -> float:
        """Time of the run so far, in all processes that worked on it."""
        return self._before + time.perf_counter() - self._began

    def remaining(self) -> Iterator[Record]:
        """Train from where the run is to its end, if it is not there yet."""
        return remaining(self.run, self.state, self.rows)

    def keep(self, record: Record) -> Row:
        """Add the row of a round, and checkpoint where it is time."""
        row = record.to_json()
        with telling(self.folder.path):
            self._records.append(row)
        self.rows.append(row)
        self.state = record.state
        self._checkpoints.saw(record.state)
        if time.perf_counter() - self._checked >= max(self.every, COSTS * self._cost):
            self.checkpoint()
        return row

    def checkpoint(self, final: bool = False) -> None:
        """Write the state as it is; rows up to here are never cut off again."""
        if self.state is None:
            return
        began = time.perf_counter()
        with telling(self.folder.path):
            self._records.sync()
            self._checkpoints.write(self.state, self._records.size, self.seconds, final)
        self._checked = time.perf_counter()
        self._cost = self._checked - began if self.every else 0.0

    def finish(self, error: DivergedError | None) -> dict[str, Any]:
        """Write the last state, the model, and last of all the result, which marks the end."""
        self.checkpoint(final=error is None)
        result: dict[str, Any] = {
            "status": "diverged" if error else "target" if self._at_target() else "finished",
            "rounds": len(self.rows),
            "diverged_at": error.round if error else None,
            "seconds": self.seconds,
        }
        with telling(self.folder.path):
            if error is not None:
                result["reason"] = error.what
            elif self.state is not None:
                write_bytes(self.folder.path / MODEL, model_bytes(self.run, self.state))
            write_json(self.folder.path / RESULT, result)
            self._checkpoints.settle(final=error is None)
        return result

    def close(self) -> None:
        self._records.close()

    def _at_target(self) -> bool:
        return bool(self.rows) and self.run.reached(self.rows[-1])


def remaining(run: Run, state: SimulationState | None, rows: Sequence[Row]) -> Iterator[Record]:
    """The records that a run has still to make: to its last round, or to its target."""
    if rows and (len(rows) >= run.rounds or run.reached(rows[-1])):
        return
    for record in run.records(state):
        yield record
        if run.reached(record.to_json()):
            return


def model_bytes(run: Run, state: SimulationState) -> bytes:
    """The output model: a module's `state_dict`, or the plain parameters of what is none."""
    params, buffers = state.output()
    on_host = params.cpu(), Buffers(*(each.cpu() for each in buffers))
    load = getattr(run.task.objective, "load", None)
    module = load(*on_host) if load else None
    named: dict[str, Tensor] = {"params": on_host[0]}
    return to_bytes(module.state_dict() if isinstance(module, nn.Module) else named)


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


def _device(run: Run) -> torch.device:
    """Where the run's tensors are to be, as `simulate` decides it."""
    given = run.spec.device
    return torch.device(given) if given else next(iter(run.task.train.fields.values())).device
